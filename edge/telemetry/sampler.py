"""The one task that asks all sources, keeps the latest merged sample and a history, and feeds the energy meter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from edge.telemetry.energy import EnergyMeter
from edge.telemetry.history import History, Moment
from edge.telemetry.jtop import JtopSource
from edge.telemetry.jtop_line import CALM_S, WATCHED_S
from edge.telemetry.sample import Sample, merge
from edge.telemetry.source import Clock, Reader, Source
from edge.waits import happens

log = logging.getLogger("edge.telemetry")

QUICK_S = 0.1
WATCHED_FOR_S = 10.0  # after somebody looked, he is taken to look again
_WAIT_S = 0.5  # for a slow source, once, before samples are made without it
_ORDER = ("sysfs", "nvml", "jtop", "host")  # most trusted first

# (t, W, bytes, °C) on the monotonic clock: the start record's samples.
TracePoint = tuple[float, float | None, int | None, float | None]


class Sampler:
    """`run()` is the task; everything else is read from the same event loop."""

    def __init__(
        self,
        sources: Sequence[Source],
        jtop: JtopSource | None = None,
        *,
        interval_s: float = 1.0,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.latest: Sample | None = None
        self.history = History()
        self.energy = EnergyMeter()
        self.readers = [Reader(source, interval_s, clock) for source in sources]
        self.jtop = jtop
        self.clock = clock
        self.wall = wall
        self._interval_s = interval_s
        self._listeners: list[Callable[[Sample | None], None]] = []
        self._traces: list[list[TracePoint]] = []
        self._hurry = asyncio.Event()
        self._watched_until_s = float("-inf")
        self._said: dict[str, str] = {}

    @property
    def parts(self) -> list[Reader | JtopSource]:
        return [*self.readers, *([self.jtop] if self.jtop is not None else [])]

    def fresh(self, now: float) -> dict[str, Sample]:
        """By source, what is not too old to count."""
        return {part.name: sample for part in self.parts if (sample := part.fresh(now)) is not None}

    def on_sample(self, listener: Callable[[Sample | None], None]) -> None:
        """Called once an interval, on the event loop; None when no source has anything fresh. It must not block."""
        self._listeners.append(listener)

    def watched(self) -> None:
        """Somebody looks: jtop is asked every second for a while."""
        self._watched_until_s = self.clock() + WATCHED_FOR_S
        if self.jtop is not None:
            self.jtop.pace(WATCHED_S)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[TracePoint]]:
        """While open, power, memory and temperature are read ten times a second into the list."""
        points: list[TracePoint] = []
        self._traces.append(points)
        self._hurry.set()
        try:
            yield points
        finally:
            self._traces = [trace for trace in self._traces if trace is not points]

    async def run(self) -> None:
        """Until cancelled. A full sample every interval, quick ones between while a trace is open.

        May be run again after it failed: the readers and their threads go on until it is cancelled.
        """
        guest = asyncio.create_task(self.jtop.run()) if self.jtop is not None else None
        due = self.clock()
        try:
            while True:
                await self._full()
                due = max(due + self._interval_s, self.clock())
                await self._until(due)
        except asyncio.CancelledError:
            for reader in self.readers:
                reader.close()
            raise
        finally:
            if guest is not None:
                guest.cancel()
                await asyncio.gather(guest, return_exceptions=True)

    async def _until(self, due: float) -> None:
        self._hurry.clear()
        while (left := due - self.clock()) > 0:
            if self._traces:
                await asyncio.sleep(min(QUICK_S, left))
                if due - self.clock() > QUICK_S / 2:
                    await self._quick()
                continue
            await happens(self._hurry, left)
            self._hurry.clear()  # a trace that was opened and closed again must not make this spin

    async def _ask(self, *, quick: bool) -> Sample | None:
        asked_s = self.clock()
        asked = [reader.ask(quick=quick) for reader in self.readers if reader.ready(asked_s)]
        if asked:
            await asyncio.wait(asked, timeout=_WAIT_S)
        now = self.clock()
        fresh = self.fresh(now)
        return merge(fresh[name] for name in sorted(fresh, key=_rank))

    async def _full(self) -> None:
        merged = await self._ask(quick=False)
        self._report()
        if self.jtop is not None and self.clock() > self._watched_until_s:
            self.jtop.pace(CALM_S)
        if merged is not None:
            self.latest = merged
            self._keep(merged)
        for listener in self._listeners:
            listener(merged)

    async def _quick(self) -> None:
        sample = await self._ask(quick=True)
        if sample is not None:
            self._measure(sample)

    def _keep(self, sample: Sample) -> None:
        self._measure(sample)
        used = sample.memory.used_bytes if sample.memory else None
        tokens = self.energy.tokens()
        self.history.add(Moment(sample.at_s, sample.power_w, sample.temp_c, sample.gpu_load_ratio, used, tokens))

    def _measure(self, sample: Sample) -> None:
        if sample.power_w is not None:
            self.energy.add(sample.at_s, sample.power_w, self.wall())
        used = sample.memory.used_bytes if sample.memory else None
        for points in self._traces:
            points.append((sample.at_s, sample.power_w, used, sample.temp_c))

    def _report(self) -> None:
        """One line when a source fails and one when it is back."""
        for reader in self.readers:
            if reader.error is None and reader.name in self._said:
                log.info("telemetry: %s is back", reader.name)
                del self._said[reader.name]
            elif reader.error is not None and reader.error != self._said.get(reader.name):
                log.warning("telemetry: %s failed: %s", reader.name, reader.error)
                self._said[reader.name] = reader.error


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)
