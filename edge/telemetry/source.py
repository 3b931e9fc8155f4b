"""Read each blocking sensor source in a thread of its own, so that one that hangs costs only itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from edge.telemetry.sample import Sample, plausible

Clock = Callable[[], float]
_LONGEST_PAUSE = 32  # intervals between reads of a source that keeps failing


class SensorSource(Protocol):
    """A set of sensors that is read together."""

    @property
    def name(self) -> str: ...

    def read(self, now: float, *, quick: bool = False) -> Sample:
        """Return one sample; may block, may raise. `quick`: power, temperature and memory are enough."""
        ...


class SourceReader:
    """A source and its thread. `latest` is its last sample, `error` why the last read failed.

    The thread is a daemon: a read that never returns (a dead I2C bus, a lost GPU) must not block the exit.
    """

    def __init__(self, source: SensorSource, interval_s: float, clock: Clock) -> None:
        self.name = source.name
        self.latest: Sample | None = None
        self.error: str | None = None
        self._source = source
        self._interval_s = interval_s
        self._clock = clock
        self._wake = threading.Event()
        self._quick = False
        self._closed = False
        self._failures = 0
        self._paused_until_s = float("-inf")
        self._reading: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    def fresh(self, now: float) -> Sample | None:
        """Return the latest sample unless it is older than three intervals (at least 3 s: the machine may be busy)."""
        sample = self.latest
        return sample if sample is not None and sample.age_s(now) <= 3 * max(1.0, self._interval_s) else None

    def ready(self, now: float) -> bool:
        """Return whether a read may start: none is running, and the pause after a failure is over."""
        return (self._reading is None or self._reading.done()) and now >= self._paused_until_s

    def ask(self, *, quick: bool = False) -> asyncio.Future[None]:
        """Start a read, only when `ready`. The future completes with the read, failed or not."""
        self._quick = quick
        self._reading = asyncio.get_running_loop().create_future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"telemetry-{self.name}", daemon=True)
            self._thread.start()
        self._wake.set()
        return self._reading

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                return
            future = self._reading
            if future is not None:
                self._read(future)

    def _read(self, future: asyncio.Future[None]) -> None:
        sample, error = None, None
        try:
            sample = plausible(self._source.read(self._clock(), quick=self._quick))
        except Exception as failure:  # libraries of drivers raise classes of their own; telemetry must outlive them
            error = f"{type(failure).__name__}: {failure}"
        try:
            future.get_loop().call_soon_threadsafe(self._done, future, sample, error)
        except RuntimeError:  # the loop closed while we read
            self._closed = True

    def _done(self, future: asyncio.Future[None], sample: Sample | None, error: str | None) -> None:
        """Keep the result; called on the event loop."""
        self.latest, self.error = sample or self.latest, error
        self._failures = 0 if error is None else self._failures + 1
        if error is not None:
            pause = min(2 ** (self._failures - 1), _LONGEST_PAUSE)
            self._paused_until_s = self._clock() + pause * self._interval_s - self._interval_s / 2
        if not future.done():
            future.set_result(None)
