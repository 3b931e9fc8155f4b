"""The kernel's word on who was killed for memory: cgroup counters and, where readable, the kernel log."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def oom_kills(pid: int, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How often the kernel has killed for memory in the process's cgroup: v2 memory.events, v1 memory.oom_control."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if not controllers:
            count = _counter(cgroup_root / relative / "memory.events", "oom_kill")
        elif "memory" in controllers.split(","):
            count = _counter(cgroup_root / "memory" / relative / "memory.oom_control", "oom_kill")
        else:
            continue
        if count is not None:
            return count
    return None


def kernel_log_names(pid: int, kmsg: Path = Path("/dev/kmsg")) -> bool:
    """Whether the kernel log says that it killed this pid for memory. False where it cannot be read."""
    pattern = re.compile(rb"(?:Out of memory|Memory cgroup out of memory): Killed process %d \(" % pid)
    try:
        descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):  # EAGAIN is the end of the log
            while record := os.read(descriptor, 8192):
                if pattern.search(record):
                    return True
    finally:
        os.close(descriptor)
    return False


def _counter(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        return None
    return None
