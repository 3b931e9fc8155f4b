"""What a folder lies on, and how fast it can be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge.board import readrate
from edge.board.storage import classify, mount_of, mounts
from edge.linux.tree import Tree
from tests.trees.trees import copy, tree, write

MIB = 1 << 20


def _mounted(root: Path, *lines: str) -> Tree:
    write(root, "proc/self/mountinfo", "".join(f"{line}\n" for line in lines))
    return Tree(root)


@pytest.mark.parametrize(
    ("name", "kind", "disk"),
    [
        ("orin-nano-8", "nvme", "nvme0n1"),
        ("nano", "sd", "mmcblk0"),
        ("tx2", "emmc", "mmcblk0"),
        ("x86-vm", "virtual", "vda"),
    ],
)
def test_disks_of_the_trees(name: str, kind: str, disk: str) -> None:
    found = classify(Tree(tree(name)), Path("/var/lib/edgellm/models"))
    assert found is not None
    assert (found.kind, found.disk, found.mount) == (kind, disk, "/")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("2 1 0:50 / /m rw - nfs4 server:/models rw,vers=4.2", "network"),
        ("2 1 0:50 / /m rw - fuse.sshfs me@host: rw", "network"),
        ("2 1 0:50 / /m rw - tmpfs tmpfs rw", "memory"),
        ("2 1 0:50 / /m rw - 9p C:\\134 rw,aname=drvfs;path=C:\\", "windows"),
        ("2 1 0:50 / /m rw - 9p share rw,trans=virtio", "network"),
        ("2 1 0:50 / /m rw - overlay overlay rw,lowerdir=/a,upperdir=/b", "container"),
        ("2 1 0:50 / /m rw - btrfs /dev/nvme1n1p3 rw", "nvme"),
        ("2 1 8:1 / /m rw - ext4 /dev/sda1 rw", "ssd"),
        ("2 1 8:17 / /m rw - ext4 /dev/sdb1 rw", "hdd"),
        ("2 1 253:0 / /m rw - ext4 /dev/mapper/vg-models rw", "nvme"),
        ("2 1 0:50 / /m rw - zfs tank/models rw", "unknown"),
    ],
)
def test_kinds_of_storage(tmp_path: Path, line: str, kind: str) -> None:
    for disk, device, rotational in (("sda", "8:0", 0), ("sdb", "8:16", 1), ("nvme1n1", "259:5", 0)):
        write(tmp_path, f"sys/class/block/{disk}/dev", device)
        write(tmp_path, f"sys/class/block/{disk}/queue/rotational", str(rotational))
    write(tmp_path, "sys/class/block/sda1/dev", "8:1")
    write(tmp_path, "sys/class/block/sdb1/dev", "8:17")
    write(tmp_path, "sys/class/block/dm-0/dev", "253:0")
    write(tmp_path, "sys/class/block/dm-0/slaves/nvme1n1p3/dev", "259:8")
    found = classify(_mounted(tmp_path, "1 0 254:0 / / rw - ext4 /dev/vda rw", line), Path("/m/models"))
    assert found is not None
    assert found.kind == kind


def test_usb_disk_is_known_by_its_place_in_sysfs(tmp_path: Path) -> None:
    place = "sys/devices/pci0000:00/0000:00:14.0/usb2/2-1/2-1:1.0/host6/block/sdc"
    write(tmp_path, f"{place}/queue/rotational", "0")
    write(tmp_path, f"{place}/dev", "8:32")
    (tmp_path / "sys/class/block").mkdir(parents=True)
    (tmp_path / "sys/class/block/sdc").symlink_to("../../../" + place)
    found = classify(_mounted(tmp_path, "1 0 8:32 / / ro,noatime - ext4 /dev/sdc rw"), Path("/models"))
    assert found is not None
    assert (found.kind, found.read_only) == ("usb", True)


def test_innermost_and_last_mount_counts(tmp_path: Path) -> None:
    lines = (
        "1 0 254:0 / / rw - ext4 /dev/vda rw",
        "2 1 0:1 / /data rw - tmpfs a rw",
        "3 1 0:2 / /data rw - tmpfs b rw",
        "4 1 0:3 / /data\\040two rw - tmpfs c rw",
    )
    table = mounts(_mounted(tmp_path, *lines))

    def source(folder: str) -> str:
        mount = mount_of(table, Path(folder))
        assert mount is not None
        return mount.source

    assert [source(f) for f in ("/data/models", "/data two/x", "/database", "/")] == ["b", "c", "/dev/vda", "/dev/vda"]


def test_machine_without_a_mount_table(tmp_path: Path) -> None:
    assert classify(Tree(tmp_path), Path("/models")) is None


def test_wsl2_disks_are_virtual(tmp_path: Path) -> None:
    found = classify(Tree(copy("wsl2", tmp_path)), Path("/home/ann/models"))
    assert found is not None
    assert found.kind == "virtual"


def test_rate_is_measured_within_its_budget(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(24 * MIB))
    found = readrate.measure(file, budget_bytes=16 * MIB)
    if found is None:
        pytest.skip("the file system of the temporary folder has no direct reads")
    assert 0 < found.read_bytes <= 32 * MIB  # each stream reads whole chunks
    assert found.bytes_s == found.by_streams[found.streams] == max(found.by_streams.values())


def test_rate_stops_at_its_time_limit(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom(24 * MIB))
    ticks = iter(range(100_000))
    found = readrate.measure(file, limit_s=6.0, clock=lambda: float(next(ticks)))
    if found is not None:
        assert len(found.by_streams) < 4


def test_small_and_missing_files_are_not_measured(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x" * 1000)
    assert readrate.measure(small) is None
    with pytest.raises(OSError):
        readrate.measure(tmp_path / "missing")


def test_biggest_file_ignores_links_and_depth(tmp_path: Path) -> None:
    write(tmp_path, "a/b/c/d/e/huge", b"x" * 1000)
    write(tmp_path, "a/model.gguf", b"x" * 100)
    write(tmp_path, "other", b"x" * 10)
    (tmp_path / "link").symlink_to(tmp_path / "a/b/c/d/e/huge")
    assert readrate.biggest_file((tmp_path,)) == tmp_path / "a/model.gguf"
    assert readrate.biggest_file((tmp_path / "nothing",)) is None
