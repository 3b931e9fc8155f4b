"""Which process listens on a port: for the message that says it is taken. Best effort, from /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"


def owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """`python3 (pid 1234)`; None when it cannot be told (another user's, or gone)."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(proc / "net" / table, port)}
    for process in proc.iterdir() if inodes else ():
        if process.name.isdecimal() and _holds(process, inodes):
            with contextlib.suppress(OSError):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return None


def _inodes(table: Path, port: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _holds(process: Path, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in inodes:
                    return True
    return False
