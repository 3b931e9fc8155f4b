"""Folders whose content is lost at power-off: named in one warning at the start of the service."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from edge.linux.files import visible
from edge.paths import Folders

# Types in mountinfo's field behind " - " (proc(5)); `rootfs` is an initramfs over which no disk was mounted.
VOLATILE = {"tmpfs", "ramfs", "rootfs"}


def lost_on_reboot(folders: Folders, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return a warning that names the lost folders, or None if state and cache are on disk."""
    state, cache = folders.instance_state, folders.cache
    lost = [
        (state, "the history of starts and crashes"),
        (cache, "what was compiled and looked up (kernels, engine flags)"),
    ]
    kinds = [(why, what, path) for path, what in lost if (why := _why(path, mountinfo)) is not None]
    if not kinds:
        return None
    return "; ".join(f"{path} {why}: {what} is lost at power-off" for why, what, path in kinds)


def _why(path: Path, mountinfo: Path) -> str | None:
    # The folder may not exist yet: its nearest existing parent has the file system on which it will be made.
    here = next(part for part in (path, *path.parents) if visible(part))
    if not os.access(here, os.W_OK):
        return "cannot be written"
    kind = filesystem(here, _read(mountinfo))
    return f"is in memory ({kind})" if kind in VOLATILE else None


def filesystem(path: Path, mountinfo: Iterable[str]) -> str | None:
    """Return the type of the file system of `path`: that of its longest mount point, the last mounted of equals."""
    best, kind = -1, None
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        # The kernel escapes blanks and backslashes of a mount point in octal, such as \040 (proc(5)).
        point = fields[4].encode("latin-1", "replace").decode("unicode_escape")
        inside = point == "/" or path == Path(point) or Path(point) in path.parents
        # >=: of two mounts on one point the later line is on top.
        if inside and len(point) >= best:
            best, kind = len(point), after.split()[0]
    return kind


def _read(mountinfo: Path) -> list[str]:
    try:
        return mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
