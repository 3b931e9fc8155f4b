"""What is lost at power-off, by what is mounted where."""

from __future__ import annotations

from pathlib import Path

from edge.board.storage import mount_of, mounts
from edge.daemon.history import lost_on_reboot
from edge.linux.tree import Tree
from edge.paths import Folders

LINES = [
    "1 0 8:1 / / rw - ext4 /dev/root rw",
    "2 1 0:30 / /var/lib/edgellm/state rw - tmpfs tmpfs rw",
    "3 1 8:2 / /mnt/with\\040space rw - ext4 /dev/sda2 rw",
    "4 1 0:31 / /var rw - overlay overlay rw",
    "broken",
]


def mounted(root: Path, *lines: str) -> Tree:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return Tree(root)


def test_the_longest_mount_point_counts(tmp_path: Path) -> None:
    table = mounts(mounted(tmp_path, *LINES))

    def filesystem(path: str) -> str | None:
        mount = mount_of(table, Path(path))
        return mount.filesystem if mount is not None else None

    assert filesystem("/var/lib/edgellm/state/main") == "tmpfs"
    assert filesystem("/var/lib/edgellm") == "overlay"
    assert filesystem("/mnt/with space/x") == "ext4"
    assert filesystem("/variety") == "ext4"
    assert mount_of([], Path("/x")) is None


def test_it_is_said_where_state_is_in_memory(tmp_path: Path) -> None:
    folders = Folders(tmp_path, tmp_path / "state", tmp_path / "cache", tmp_path / "run", tmp_path / "etc")
    root = "1 0 8:1 / / rw - ext4 /dev/root rw"
    assert lost_on_reboot(folders, mounted(tmp_path, root)) is None
    said = lost_on_reboot(folders, mounted(tmp_path, root, f"2 1 0:1 / {tmp_path} rw - tmpfs tmpfs rw"))
    assert said is not None
    assert "the history of starts and crashes is lost at power-off" in said
