"""Poll all sources in one task, keep the latest merged sample and a history, and feed the energy meter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from edge.linux.timeouts import happens
from edge.telemetry.energy import EnergyMeter
from edge.telemetry.jtop import JtopSource
from edge.telemetry.jtop_line import IDLE_INTERVAL_S, WATCHED_INTERVAL_S
from edge.telemetry.sample import History, HistoryPoint, Sample, merge
from edge.telemetry.source import Clock, SensorSource, SourceReader

log = logging.getLogger("edge.telemetry")

QUICK_S = 0.1  # a request of half a second has five samples; one read of a Jetson's files takes about 1 ms
WATCHED_FOR_S = 10.0  # `edgellm top` and the status page ask again within seconds
_WAIT_S = 0.5  # for a slow source; then the sample is made without it
_ORDER = ("sysfs", "nvml", "jtop", "host")  # most trusted first: jtop reads the same files later

# (instant on the monotonic clock, W, bytes, °C): the samples of a start record.
TracePoint = tuple[float, float | None, int | None, float | None]


class Sampler:
    """The sampling task `run()` and its results, all on one event loop."""

    def __init__(
        self,
        sources: Sequence[SensorSource],
        jtop: JtopSource | None = None,
        *,
        interval_s: float = 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self.latest: Sample | None = None
        self.history = History()
        self.energy = EnergyMeter()
        self.readers = [SourceReader(source, interval_s, clock) for source in sources]
        self.jtop = jtop
        self.clock = clock
        self.wall: Clock = time.time
        self._interval_s = interval_s
        self._listeners: list[Callable[[Sample | None], None]] = []
        self._traces: list[list[TracePoint]] = []
        self._hurry = asyncio.Event()  # a trace was opened or a request started
        self.energy.on_begin = self._hurry.set
        self._watched_until_s = float("-inf")
        self._logged: dict[str, str] = {}

    @property
    def parts(self) -> list[SourceReader | JtopSource]:
        return [*self.readers, *([self.jtop] if self.jtop is not None else [])]

    def fresh(self, now: float) -> dict[str, Sample]:
        """Return the fresh samples by source."""
        return {part.name: sample for part in self.parts if (sample := part.fresh(now)) is not None}

    def tokens_per_s(self) -> float | None:
        """Return the rate of the last ten seconds; None where a request is open of which no token is counted yet."""
        rate = self.history.rate()
        return None if rate == 0 and self.energy.open() else rate

    def follow(self, other: Sampler) -> None:
        """Read the sources of another sampler, not started, from the next interval on. A jtop that runs is kept."""
        for reader in self.readers:
            reader.close()
        self.readers = other.readers
        self.jtop = self.jtop or other.jtop

    def on_sample(self, listener: Callable[[Sample | None], None]) -> None:
        """Register a callback for each interval, on the event loop; it gets None when no source is fresh."""
        self._listeners.append(listener)

    def watched(self) -> None:
        """Poll jtop every second for a while, because a client shows its values."""
        self._watched_until_s = self.clock() + WATCHED_FOR_S
        if self.jtop is not None:
            self.jtop.set_interval(WATCHED_INTERVAL_S)

    @contextlib.contextmanager
    def trace(self) -> Iterator[list[TracePoint]]:
        """Collect power, memory and temperature ten times a second while the context is open."""
        points: list[TracePoint] = []
        self._traces.append(points)
        self._hurry.set()
        try:
            yield points
        finally:
            self._traces = [trace for trace in self._traces if trace is not points]

    async def run(self) -> None:
        """Sample until cancelled: fully every interval, quickly between while a trace or a request is open.

        It may run again after a failure; the readers and their threads end only when it is cancelled.
        """
        jtop_task: asyncio.Task[None] | None = None
        due = self.clock()
        try:
            while True:
                if jtop_task is None and self.jtop is not None:
                    jtop_task = asyncio.create_task(self.jtop.run())
                await self._full()
                due = max(due + self._interval_s, self.clock())
                await self._until(due)
        except asyncio.CancelledError:
            for reader in self.readers:
                reader.close()
            raise
        finally:
            if jtop_task is not None:
                jtop_task.cancel()
                await asyncio.gather(jtop_task, return_exceptions=True)

    async def _until(self, due: float) -> None:
        self._hurry.clear()
        while (left := due - self.clock()) > 0:
            if self._traces or self.energy.open():
                await asyncio.sleep(min(QUICK_S, left))
                if due - self.clock() > QUICK_S / 2:
                    await self._quick()
                continue
            await happens(self._hurry, left)
            self._hurry.clear()  # else a trace or request that has ended again would make this spin

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
            self.jtop.set_interval(IDLE_INTERVAL_S)
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
        self.history.add(HistoryPoint(sample.at_s, sample.power_w, sample.temp_c, sample.gpu_load_ratio, used, tokens))

    def _measure(self, sample: Sample) -> None:
        if sample.power_w is not None:
            self.energy.add(sample.at_s, sample.power_w, self.wall())
        used = sample.memory.used_bytes if sample.memory else None
        for points in self._traces:
            points.append((sample.at_s, sample.power_w, used, sample.temp_c))

    def _report(self) -> None:
        """Log one line when a source fails and one when it recovers."""
        for reader in self.readers:
            if reader.error is None and reader.name in self._logged:
                log.info("telemetry: %s answers again", reader.name)
                del self._logged[reader.name]
            elif reader.error is not None and reader.error != self._logged.get(reader.name):
                log.warning("telemetry: %s failed: %s", reader.name, reader.error)
                self._logged[reader.name] = reader.error


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)
