"""What a sampler reads: blocking sources, each in a thread of its own, so that one that hangs costs only itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from edge.telemetry.sample import Sample

Clock = Callable[[], float]
_LONGEST_REST = 32  # intervals between tries of a source that keeps failing


class Source(Protocol):
    @property
    def name(self) -> str: ...

    def read(self, now: float, *, quick: bool = False) -> Sample:
        """May block. `quick`: power, temperature and memory are enough."""
        ...


class Reader:
    """One source and its thread. `ask()` starts a read; `latest` is what came last, `error` why nothing comes now.

    The thread is a daemon: a read that never returns (a dead I2C bus, a lost GPU) must not hold up our exit.
    """

    def __init__(self, source: Source, interval_s: float, clock: Clock) -> None:
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
        self._rest_until_s = float("-inf")
        self._reading: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    def fresh(self, now: float) -> Sample | None:
        """The latest unless it is three intervals old (three seconds at least: the machine may be busy)."""
        sample = self.latest
        return sample if sample is not None and sample.age_s(now) <= 3 * max(1.0, self._interval_s) else None

    def ready(self, now: float) -> bool:
        """Not while a read is under way, and less and less often while it fails."""
        return (self._reading is None or self._reading.done()) and now >= self._rest_until_s

    def ask(self, *, quick: bool = False) -> asyncio.Future[None]:
        """Done when a sample is there, or the read failed. Only when `ready`."""
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
            sample = self._source.read(self._clock(), quick=self._quick)
        except Exception as failure:  # a driver's library may raise anything; telemetry must outlive it
            error = f"{type(failure).__name__}: {failure}"
        try:
            future.get_loop().call_soon_threadsafe(self._done, future, sample, error)
        except RuntimeError:  # the loop closed while we read
            self._closed = True

    def _done(self, future: asyncio.Future[None], sample: Sample | None, error: str | None) -> None:
        """On the event loop."""
        self.latest, self.error = sample or self.latest, error
        self._failures = 0 if error is None else self._failures + 1
        if error is not None:
            pause = min(2 ** (self._failures - 1), _LONGEST_REST)
            self._rest_until_s = self._clock() + pause * self._interval_s - self._interval_s / 2
        if not future.done():
            future.set_result(None)
