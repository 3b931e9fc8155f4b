"""A memory cgroup of the test's own, v1 or v2, where root and a memory controller exist."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    def __init__(self, path: Path, v2: bool) -> None:
        self.path = path
        self._limit = "memory.max" if v2 else "memory.limit_in_bytes"
        self._events = "memory.events" if v2 else "memory.oom_control"

    def join(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, size: int | None) -> None:
        value = str(size) if size is not None else "max" if self._limit == "memory.max" else "-1"
        for _ in range(150):  # v1 says EBUSY while the memory of a dead member is being given back
            with contextlib.suppress(OSError):
                (self.path / self._limit).write_text(value)
                return
            time.sleep(0.01)
        raise OSError(f"{self.path} takes no limit of {value}")

    @property
    def oom_kills(self) -> int:
        fields = dict(line.split() for line in (self.path / self._events).read_text().splitlines())
        return int(fields["oom_kill"])


@contextmanager
def memory_group() -> Iterator[MemoryGroup | None]:
    """Return a memory cgroup, or None without root or a controller."""
    v1 = ROOT / "memory"
    v2 = "memory" in _words(ROOT / "cgroup.subtree_control")
    parent = v1 if (v1 / "memory.limit_in_bytes").exists() else ROOT if v2 else None
    path = parent / f"edgellm-test-{os.getpid()}" if parent else None
    try:
        if path is not None:
            path.mkdir()
    except OSError:
        path = None
    if path is None:
        yield None
        return
    group = MemoryGroup(path, v2=parent == ROOT)
    # A host with swap would swap before it kills.
    for name, value in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
        with contextlib.suppress(OSError):  # each exists in one version only
            (path / name).write_text(value)
    try:
        yield group
    finally:
        for _ in range(500):  # the last member is gone a moment after it was waited for
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.01)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
