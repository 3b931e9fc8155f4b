"""Wait for memory after starts failed for want of it: name the processes that hold it, and watch for their end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from edge.linux import procfs
from edge.supervisor.process_io import gone
from edge.supervisor.status import Failure
from edge.units import MIB, format_bytes

# The end of a smaller process makes no room for a model, and each look costs all tries of a start.
HOLDER_BYTES = 128 * MIB
MOST_HOLDERS = 8
NAMED = 3


class MemoryHolder(NamedTuple):
    """A process with much memory. `bytes`: anonymous memory and swap, or memory of a GPU."""

    pid: int
    name: str
    bytes: int


GpuHolders = Callable[[], Iterable[MemoryHolder]]


def find_holders(gpu: Iterable[MemoryHolder] = (), proc: Path = procfs.PROC) -> tuple[MemoryHolder, ...]:
    """Return the processes with the most memory, the largest first. Reads /proc; this process is left out.

    Processes of other users are included: /proc/PID/status is readable to all.
    """
    found = {holder.pid: holder for holder in gpu if holder.bytes >= HOLDER_BYTES}
    for pid in procfs.pids(proc):
        usage = procfs.read_usage(pid, proc)
        size = usage.rss_anon_bytes + usage.swap_bytes if usage is not None else 0
        if size >= HOLDER_BYTES and (pid not in found or found[pid].bytes < size):
            found[pid] = MemoryHolder(pid, procfs.process_name(pid, proc), size)
    found.pop(os.getpid(), None)
    return tuple(sorted(found.values(), key=lambda holder: -holder.bytes)[:MOST_HOLDERS])


class MemoryWait:
    """Calls `on_freed` once a process that held memory has ended. `holders` is known soon after `begin`.

    `gpu` lists processes with memory of a discrete GPU, as its driver reports them.
    """

    def __init__(self, on_freed: Callable[[], None], gpu: GpuHolders = lambda: ()) -> None:
        self.holders: tuple[MemoryHolder, ...] = ()
        self._on_freed = on_freed
        self._gpu = gpu
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start waiting; `end` it when memory is no longer waited for."""
        self.end()
        self._task = asyncio.create_task(self._wait())

    def end(self) -> None:
        """Stop waiting."""
        if self._task is not None:
            self._task.cancel()
        self._task, self.holders = None, ()

    @property
    def sentence(self) -> str:
        """Name the largest holders; empty if none is known."""
        named = [f"{holder.name} (pid {holder.pid}) {format_bytes(holder.bytes)}" for holder in self.holders[:NAMED]]
        return f"memory is held by {', '.join(named)}" if named else ""

    def explain(self, failure: Failure | None) -> Failure | None:
        """Return the failure with the largest holders in its evidence, while memory is waited for."""
        if failure is None or not self.sentence:
            return failure
        return replace(failure, evidence=f"{self.sentence}\n{failure.evidence}")

    async def _wait(self) -> None:
        self.holders = await asyncio.to_thread(find_holders, list(self._gpu()))
        if not self.holders:
            return
        ends = [asyncio.ensure_future(gone(holder.pid)) for holder in self.holders]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            # Awaited, so that each pidfd is closed and its reader removed before the loop goes on.
            await asyncio.gather(*ends, return_exceptions=True)
        self._on_freed()
