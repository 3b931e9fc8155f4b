"""Tells when a process ends: a pidfd where the kernel has them (5.3), else a look every 50 ms."""

from __future__ import annotations

import asyncio
import os

from edge.supervisor.child import Child
from edge.supervisor.exit import ExitStatus

FALLBACK_POLL_S = 0.05


async def gone(pid: int) -> None:
    """Returns once the process has ended (it still has to be reaped). Cancellable."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        while not _ended(pid):
            await asyncio.sleep(FALLBACK_POLL_S)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def reaped(child: Child) -> ExitStatus:
    """Once it has ended. A pidfd is readable a moment before the zombie can be reaped."""
    await gone(child.pid)
    while (status := child.poll()) is None:
        await asyncio.sleep(0.001)
    return status


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
