"""Detect whether the kernel killed a child for memory, by cgroup counters and, where readable, the kernel log."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from edge.linux.control_group import PREFIX

APART_S = 10.0  # from one reading of the counters to the next


class OomWitness:
    """The OOM counters of a child's cgroup, read at its spawn: a zombie's cgroup can no longer be read."""

    def __init__(
        self,
        pid: int,
        spawned_at_s: float,
        *,
        proc: Path = Path("/proc"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        kmsg: Path = Path("/dev/kmsg"),
    ) -> None:
        self.pids = {pid}  # of the child, and of the engine behind it where the child is a script
        self._spawned_at_s = spawned_at_s
        self._kmsg = kmsg
        self._counters = {
            path: count for path in _counters(pid, proc, cgroup_root) if (count := _read(path)) is not None
        }
        self._newer = self._counters
        self._read_at_s = spawned_at_s

    def alive(self, now_s: float) -> None:
        """Note that the child lives, so kills counted by now hit another process of its cgroup. Call now and then.

        Counters are compared with the reading before the last one: a large process takes seconds from SIGKILL to exit.
        """
        if now_s - self._read_at_s < APART_S:
            return
        self._read_at_s = now_s
        self._counters, self._newer = self._newer, {path: _read(path) or 0 for path in self._newer}

    def killed(self) -> bool:
        """Return whether the counters grew since, or the kernel log names one of the pids."""
        grown = any((_read(path) or 0) > before for path, before in self._counters.items())
        return grown or any(named_in_kernel_log(pid, self._spawned_at_s, self._kmsg) for pid in self.pids)


def _counters(pid: int, proc: Path, root: Path) -> Iterator[Path]:
    """Yield memory.events of cgroup v2 and memory.oom_control of v1. In a container the path is often its own root."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if not controllers:
            counted = PurePosixPath(relative)
            if counted.name.startswith(PREFIX):  # our group for the engine has no controllers; the one above counts
                counted = counted.parent
            yield root / counted / "memory.events"
            yield root / "unified" / counted / "memory.events"
        elif "memory" in controllers.split(","):
            yield root / "memory" / relative / "memory.oom_control"


def _read(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


def named_in_kernel_log(pid: int, since_s: float, kmsg: Path = Path("/dev/kmsg")) -> bool:
    """Return whether the kernel log reports this pid killed since `since_s` (monotonic), as pids are reused.

    False if the log cannot be read. Only the kernel's own lines count, from their begin: a name of a process, a device
    or a control group, which other users choose, may stand behind it.
    """
    pattern = re.compile(
        rb"(?:Memory cgroup out of memory: |Out of memory[\w ()]{0,40}: )?Kill(?:ed)? process %d[ ,(]" % pid
    )
    return any(at_s >= since_s - 1.0 and pattern.match(text) for at_s, text in _records(kmsg))


def _records(kmsg: Path) -> Iterator[tuple[float, bytes]]:
    """Yield time and text of each record: each read(2) gives `priority,sequence,microseconds,flags;text`."""
    try:
        descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:  # EPIPE: the record was overwritten; the next read gives a newer one
                continue
            except OSError:  # EAGAIN is the end of the log
                return
            if not record:
                return
            yield from _parsed(record)
    finally:
        os.close(descriptor)


def _parsed(record: bytes) -> Iterator[tuple[float, bytes]]:
    for line in record.splitlines():
        head, _, text = line.partition(b";")
        fields = head.split(b",")
        # The facility is the priority's upper part: 0 is the kernel, which gives no process that writes there that one.
        if text and len(fields) >= 3 and fields[0].isdigit() and int(fields[0]) < 8 and fields[2].isdigit():
            yield int(fields[2]) / 1e6, text
