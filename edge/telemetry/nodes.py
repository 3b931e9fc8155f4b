"""Small files of sysfs and procfs, read so that nothing can block, raise or be taken for a value."""

from __future__ import annotations

import os
from pathlib import Path

# Non-blocking: a power-gated zone answers EAGAIN, and a FIFO or a dead device must not hold the reader.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_BYTES = 65536


def read_bytes(path: str) -> bytes | None:
    """The file's bytes (64 KiB at most), or None where it cannot be read now, whatever the reason."""
    try:
        handle = os.open(path, _FLAGS)
    except (OSError, ValueError):
        return None
    try:
        return os.read(handle, _MOST_BYTES)
    except OSError:  # EAGAIN of a gated rail, EIO of an I2C fault, ENODEV
        return None
    finally:
        os.close(handle)


def read_text(path: str) -> str | None:
    """Without surrounding white space and final NULs (device-tree strings)."""
    data = read_bytes(path)
    return None if data is None else data.decode("utf-8", "replace").strip(" \t\r\n\0")


def read_int(path: str) -> int | None:
    """Empty, garbage and unreadable are all None."""
    data = read_bytes(path)
    try:
        return None if data is None else int(data)
    except ValueError:
        return None


def children(path: str, prefix: str = "") -> list[str]:
    """Paths in a folder whose names start with `prefix`, in the order of their numbers; [] if there is no folder."""
    try:
        names = [entry.name for entry in Path(path).iterdir() if entry.name.startswith(prefix)]
    except OSError:
        return []
    return [f"{path}/{name}" for name in sorted(names, key=lambda name: (len(name), name))]
