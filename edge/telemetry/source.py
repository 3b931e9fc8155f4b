"""What a sampler reads: blocking sources, each in a thread of its own, so that one that hangs costs only itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from edge.telemetry.sample import Sample

Clock = Callable[[], float]


class Source(Protocol):
    @property
    def name(self) -> str: ...

    def read(self, now: float, *, quick: bool = False) -> Sample:
        """May block. `quick`: power, temperature and memory are enough."""
        ...


class Reader:
    """One source and its thread. `ask()` starts a read; `latest` is what came last.

    The thread is a daemon: a read that never returns (a dead I2C bus, a lost GPU) must not hold up our exit.
    """

    def __init__(self, source: Source, clock: Clock) -> None:
        self.name = source.name
        self.latest: Sample | None = None
        self.error: str | None = None
        self._source = source
        self._clock = clock
        self._wake = threading.Event()
        self._quick = False
        self._closed = False
        self._reading: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """A read has been asked for and has not returned."""
        return self._reading is not None and not self._reading.done()

    def ask(self, *, quick: bool = False) -> asyncio.Future[None]:
        """Done when a sample is there, or the read failed (`error`). Not while `busy`."""
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
        try:
            sample, error = self._source.read(self._clock(), quick=self._quick), None
        except Exception as failure:  # a driver's library may raise anything; telemetry must outlive it
            sample, error = None, f"{type(failure).__name__}: {failure}"

        def done() -> None:
            self.error = error
            self.latest = sample or self.latest
            if not future.done():
                future.set_result(None)

        try:
            future.get_loop().call_soon_threadsafe(done)
        except RuntimeError:  # the loop closed while we read
            self._closed = True
