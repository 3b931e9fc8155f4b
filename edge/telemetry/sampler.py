"""The one task that asks all sources, keeps the latest merged sample and a history, and feeds the energy meter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from edge.telemetry.energy import EnergyMeter
from edge.telemetry.history import History, Moment
from edge.telemetry.sample import Sample, merge
from edge.telemetry.source import Clock, Reader, Source

log = logging.getLogger("edge.telemetry")

QUICK_S = 0.1
STALE_S = 3.0  # an older reading of a source at 1 Hz is no longer merged
_WAIT_S = 0.5  # for a slow source, once, before samples are made without it

# (t, W, bytes, °C) on the monotonic clock: the start record's samples.
TracePoint = tuple[float, float | None, int | None, float | None]


class Sampler:
    """`run()` is the task; everything else is read from the same event loop. Sources are in order of trust."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        interval_s: float = 1.0,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.latest: Sample | None = None
        self.history = History()
        self.energy = EnergyMeter()
        self._readers = [Reader(source, clock) for source in sources]
        self._interval_s = interval_s
        self._clock = clock
        self._wall = wall
        self._listeners: list[Callable[[Sample], None]] = []
        self._traces: list[list[TracePoint]] = []
        self._hurry = asyncio.Event()
        self._said: dict[str, str] = {}

    def on_sample(self, listener: Callable[[Sample], None]) -> None:
        """Called with each full sample, on the event loop. It must not block or raise."""
        self._listeners.append(listener)

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
        """Until cancelled. A full sample every `interval_s`, quick ones between while a trace is open."""
        due = self._clock()
        try:
            while True:
                await self._full()
                due = max(due + self._interval_s, self._clock())
                await self._until(due)
        finally:
            for reader in self._readers:
                reader.close()

    async def _until(self, due: float) -> None:
        self._hurry.clear()
        while (left := due - self._clock()) > 0:
            if self._traces:
                await asyncio.sleep(min(QUICK_S, left))
                if due - self._clock() > QUICK_S / 2:
                    await self._quick()
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), left)

    async def _ask(self, *, quick: bool) -> list[Sample]:
        asked = [reader.ask(quick=quick) for reader in self._readers if not reader.busy]
        if asked:
            await asyncio.wait(asked, timeout=_WAIT_S)
        now = self._clock()
        return [r.latest for r in self._readers if r.latest is not None and r.latest.age_s(now) <= STALE_S]

    async def _full(self) -> None:
        merged = merge(await self._ask(quick=False))
        self._report()
        if merged is None:
            return
        self.latest = merged
        self._keep(merged)
        for listener in self._listeners:
            listener(merged)

    async def _quick(self) -> None:
        sample = merge(await self._ask(quick=True))
        if sample is None:
            return
        if sample.power_w is not None:
            self.energy.add(sample.at_s, sample.power_w, self._wall())
        self._trace(sample)

    def _keep(self, sample: Sample) -> None:
        if sample.power_w is not None:
            self.energy.add(sample.at_s, sample.power_w, self._wall())
        used = sample.memory.used_bytes if sample.memory else None
        tokens = self.energy.tokens()
        self.history.add(Moment(sample.at_s, sample.power_w, sample.temp_c, sample.gpu_load_ratio, used, tokens))
        self._trace(sample)

    def _trace(self, sample: Sample) -> None:
        used = sample.memory.used_bytes if sample.memory else None
        for points in self._traces:
            points.append((sample.at_s, sample.power_w, used, sample.temp_c))

    def _report(self) -> None:
        """One line when a source fails and one when it is back."""
        for reader in self._readers:
            if reader.error != self._said.get(reader.name):
                if reader.error:
                    log.warning("telemetry: %s failed: %s", reader.name, reader.error)
                    self._said[reader.name] = reader.error
                else:
                    log.info("telemetry: %s is back", reader.name)
                    del self._said[reader.name]
