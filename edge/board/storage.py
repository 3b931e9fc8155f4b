"""Find the kind of storage of a folder."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from msgspec import Struct

from edge.linux.tree import Tree

# Types of mountinfo by what they mean for a cold start.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "fuse.sshfs", "fuse.rclone", "afs", "lustre"}
_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
# nvme0n1p2, mmcblk0p1, sda1: the disk is the first group.
_PARTITION = re.compile(r"^(nvme\d+n\d+|mmcblk\d+|[a-z]+)p?\d*$")
_SLAVES_DEPTH = 4  # LVM on encryption on RAID on a partition


class Storage(Struct, frozen=True):
    """Storage. `kind`: nvme, ssd, hdd, usb, emmc, sd, virtual, network, windows, memory, container, unknown."""

    mount: str
    filesystem: str
    kind: str
    disk: str | None = None  # "nvme0n1"
    read_only: bool = False


class Mount(Struct, frozen=True):
    """A line of /proc/self/mountinfo."""

    device: str  # "259:1"
    point: str
    options: str
    filesystem: str
    source: str
    more: str


def classify(tree: Tree, folder: Path) -> Storage | None:
    """Return the storage of a folder; None when the mount table cannot be read."""
    mount = mount_of(mounts(tree), folder)
    if mount is None:
        return None
    kind, disk = _kind(tree, mount)
    return Storage(mount.point, mount.filesystem, kind, disk, "ro" in mount.options.split(","))


def mounts(tree: Tree) -> list[Mount]:
    """Parse /proc/self/mountinfo, in mount order."""
    found = []
    for line in tree.lines("/proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        head, tail = left.split(), right.split(" ", 2)
        if len(head) >= 6 and len(tail) >= 2:
            more = tail[2] if len(tail) > 2 else ""
            found.append(Mount(head[2], unescaped(head[4]), head[5], tail[0], unescaped(tail[1]), more))
    return found


def mount_of(table: list[Mount], folder: Path) -> Mount | None:
    """Return the innermost mount of the folder, the last one mounted of several on one point."""
    path = PurePosixPath(folder)
    holding = [
        mount for mount in table if path == PurePosixPath(mount.point) or PurePosixPath(mount.point) in path.parents
    ]
    return max(enumerate(holding), key=lambda pair: (len(pair[1].point), pair[0]), default=(0, None))[1]


def _kind(tree: Tree, mount: Mount) -> tuple[str, str | None]:
    if mount.filesystem in ("drvfs", "9p", "virtiofs") and re.match(r"[A-Za-z]:|drvfs", mount.source + mount.more):
        return "windows", None
    if "aname=drvfs" in mount.more:
        return "windows", None
    if mount.filesystem in _NETWORK or mount.filesystem in ("9p", "virtiofs"):
        return "network", None
    if mount.filesystem in _MEMORY:
        return "memory", None
    if mount.filesystem == "overlay":
        return "container", None
    disk = _disk(tree, mount)
    return (_disk_kind(tree, disk), disk) if disk else ("unknown", None)


def _disk(tree: Tree, mount: Mount) -> str | None:
    """Return the disk below partition, LVM, encryption or RAID (its first member)."""
    block = "/sys/class/block"
    name = next((n for n in tree.children(block) if tree.word(f"{block}/{n}/dev") == mount.device), None)
    name = name or (mount.source.removeprefix("/dev/") if mount.source.startswith("/dev/") else None)
    return _whole_disk(tree, name) if name else None


def device_storage(tree: Tree, device: str) -> Storage | None:
    """Return the storage below a block device such as `/dev/mmcblk0p2`, `/dev/dm-1` or `/dev/loop0` (of its file)."""
    name = device.removeprefix("/dev/")
    behind = tree.word(f"/sys/class/block/{name}/loop/backing_file")
    if behind is not None:
        return classify(tree, Path(behind))
    disk = _whole_disk(tree, name)
    return Storage(device, "", _disk_kind(tree, disk), disk, False)


def _whole_disk(tree: Tree, name: str) -> str:
    for _ in range(_SLAVES_DEPTH):
        slaves = tree.children(f"/sys/class/block/{name}/slaves")
        if not slaves:
            break
        name = slaves[0]
    if name.startswith(("dm-", "md", "loop", "zram")):
        return name
    match = _PARTITION.match(name)
    return match[1] if match else name


def _disk_kind(tree: Tree, disk: str) -> str:
    folder = f"/sys/class/block/{disk}"
    if disk.startswith("nvme"):
        return "nvme"
    if disk.startswith("mmcblk"):
        return "sd" if tree.word(f"{folder}/device/type") == "SD" else "emmc"
    if disk.startswith(("vd", "xvd")) or "microsoft" in (tree.text("/proc/version") or "").lower():
        return "virtual"
    if disk.startswith(("ram", "zram")):
        return "memory"
    if disk.startswith("sd"):
        if "/usb" in str(tree.path(folder).resolve()):
            return "usb"
        return "hdd" if tree.number(f"{folder}/queue/rotational") == 1 else "ssd"
    return "unknown"


def unescaped(text: str) -> str:
    """Decode the octal escapes of /proc/self/mountinfo and /proc/swaps: a blank is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
