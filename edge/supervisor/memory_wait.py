"""Wait for memory after starts failed for want of it: name the processes that hold it, watch for their end, and look.

The kernel reports that memory becomes short (PSI triggers, memory.events), not that it is free again: where a process
gives memory back and lives on, only a look at MemAvailable finds it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from edge.board.memory import mem_available_bytes, parse
from edge.linux import procfs
from edge.linux.timeouts import in_thread
from edge.supervisor.process_io import gone
from edge.supervisor.status import Failure
from edge.units import MIB, format_bytes

# The end of a smaller process makes no room for a model, and each look costs all tries of a start.
HOLDER_BYTES = 128 * MIB
MOST_HOLDERS = 8
# One short file of /proc twice a minute costs nothing; a model that failed is not expected back within seconds.
LOOK_S = 30.0
NAMED = 3


class MemoryHolder(NamedTuple):
    """A process with much memory. `bytes`: anonymous memory and swap, or memory of a GPU."""

    pid: int
    name: str
    bytes: int


GpuHolders = Callable[[], Iterable[MemoryHolder]]


def find_holders(gpu: Iterable[MemoryHolder] = ()) -> tuple[MemoryHolder, ...]:
    """Return the processes with the most memory, the largest first. Reads /proc; this process is left out.

    Processes of other users are included: /proc/PID/status is readable to all.
    """
    found = {holder.pid: holder for holder in gpu if holder.bytes >= HOLDER_BYTES}
    for pid in procfs.pids():
        usage = procfs.read_usage(pid)
        size = usage.rss_anon_bytes + usage.swap_bytes if usage is not None else 0
        if size >= HOLDER_BYTES and (pid not in found or found[pid].bytes < size):
            found[pid] = MemoryHolder(pid, procfs.process_name(pid), size)
    found.pop(os.getpid(), None)
    return tuple(sorted(found.values(), key=lambda holder: -holder.bytes)[:MOST_HOLDERS])


class MemoryWait:
    """Calls `on_freed` when a process that held memory has ended, or more memory is available than when the wait began.

    `holders` is known soon after `begin`. `gpu` lists processes with memory of a discrete GPU, as its driver reports
    them. A start costs all its tries: each one that a look led to doubles the growth that the next look requires,
    until a model has served or a holder has ended.
    """

    def __init__(
        self,
        on_freed: Callable[[], None],
        gpu: GpuHolders = lambda: (),
        *,
        look_s: float | None = None,
        available: Callable[[], int] | None = None,
    ) -> None:
        self.holders: tuple[MemoryHolder, ...] = ()
        self._on_freed = on_freed
        self._gpu = gpu
        self._look_s = LOOK_S if look_s is None else look_s
        self._available = available or available_bytes
        self._growth_bytes = HOLDER_BYTES
        self._task: asyncio.Task[None] | None = None

    def follow(self, *, short: bool, served: bool) -> None:
        """Wait while a model has failed for want of memory (`short`). `served`: it runs, so that looks helped."""
        if served:
            self._growth_bytes = HOLDER_BYTES
        if short and self._task is None:
            self.begin()
        elif not short and self._task is not None:
            self.end()

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
        """Report each time. A start ends this; one that finds no room beside other models does not."""
        while True:
            await self._freed()
            self._on_freed()
            await asyncio.sleep(self._look_s)

    async def _freed(self) -> None:
        self.holders = await in_thread(partial(find_holders, list(self._gpu())), None)
        look = asyncio.ensure_future(self._grown())
        ends = [asyncio.ensure_future(gone(holder.pid)) for holder in self.holders]
        try:
            await asyncio.wait([look, *ends], return_when=asyncio.FIRST_COMPLETED)
            self._growth_bytes = self._growth_bytes * 2 if look.done() else HOLDER_BYTES
        finally:
            for each in (look, *ends):
                each.cancel()
            # Awaited, so that each pidfd is closed and its reader removed before the loop goes on.
            await asyncio.gather(look, *ends, return_exceptions=True)

    async def _grown(self) -> None:
        """Return once `_growth_bytes` more are available than now."""
        before = self._room()
        while self._room() - before < self._growth_bytes:
            await asyncio.sleep(self._look_s)

    def _room(self) -> int:
        """Return a figure that grows with the memory that processes give back, of the machine and of its GPUs."""
        return self._available() - sum(holder.bytes for holder in self._gpu())


def available_bytes() -> int:
    """Return MemAvailable; 0 if it cannot be read."""
    try:
        return mem_available_bytes(parse((procfs.PROC / "meminfo").read_text()))[0]
    except OSError:
        return 0
