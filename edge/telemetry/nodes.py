"""Read small files of sysfs and procfs without blocking and without raising."""

from __future__ import annotations

import os
from pathlib import Path

# Non-blocking: a power-gated zone answers EAGAIN (FC-62), and a FIFO or a dead device must not block the reader.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_BYTES = 65536


def read_bytes(path: str) -> bytes | None:
    """Return the file's bytes (64 KiB at most); None where it cannot be read now, for any reason."""
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
    """Return the text without surrounding white space and NULs (device-tree strings end in one)."""
    data = read_bytes(path)
    return None if data is None else data.decode("utf-8", "replace").strip(" \t\r\n\0")


def read_int(path: str) -> int | None:
    """Return the integer; None for an empty, malformed or unreadable file."""
    data = read_bytes(path)
    try:
        return None if data is None else int(data)
    except ValueError:
        return None


def children(path: str, prefix: str = "") -> list[str]:
    """Return paths in a folder whose names start with `prefix`, in numeric order; [] without the folder."""
    try:
        names = [entry.name for entry in Path(path).iterdir() if entry.name.startswith(prefix)]
    except OSError:
        return []
    return [f"{path}/{name}" for name in sorted(names, key=lambda name: (len(name), name))]
