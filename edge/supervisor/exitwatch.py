"""Wait for the end of a process: by pidfd (Linux 5.3), else by polling."""

from __future__ import annotations

import asyncio
import os

from edge.supervisor.child import Child
from edge.supervisor.exit import ExitStatus

FALLBACK_POLL_S = 0.05  # only for kernels before 5.3: JetPack 5 has 5.10, JetPack 4 (4.9) polls


async def gone(pid: int) -> None:
    """Return once the process has ended; it still has to be reaped."""
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
    """Wait for the end and reap it. A pidfd is readable shortly before the zombie can be reaped."""
    await gone(child.pid)
    while (status := child.poll()) is None:
        await asyncio.sleep(0.001)
    return status


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
