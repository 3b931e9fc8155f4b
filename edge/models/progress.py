"""Progress of a long operation on a model, with its rate and the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct


class TransferProgress(Struct, frozen=True):
    """One instant. `phase`: fetch, verify, unpack, copy or quantize; rate and remaining time are None until known."""

    phase: str
    what: str  # file name
    done_bytes: int
    total_bytes: int | None = None
    rate_bytes_s: float | None = None
    rest_s: float | None = None
    note: str | None = None


Report = Callable[[TransferProgress], None]


# Turn a growing byte count into progress with rate and remaining time, at most a few times a second.

# A person reads five updates a second at most; a pipe gets fewer lines.
_EVERY_S = 0.2
# Time constant of the rate: short enough to show a stall, long enough for a steady estimate.
_SMOOTHING_S = 5.0


class TransferMeter:
    """Progress of one file or set. `start` counts bytes of a former try; `report` may be None."""

    def __init__(
        self,
        phase: str,
        what: str,
        total: int | None,
        report: Report | None,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phase = phase
        self.what = what
        self._total = total
        self._report = report
        self._clock = clock
        self.done = start
        self._shown_at = self._measured_at = clock()
        self._measured = start
        self._rate: float | None = None
        self._tell()

    def add(self, count: int) -> None:
        self.at(self.done + count)

    def at(self, done: int) -> None:
        self.done = done
        now = self._clock()
        if self._report is not None and now - self._shown_at >= _EVERY_S:
            self._shown_at = now
            self._measure(now)
            self._tell()

    def end(self) -> None:
        self._tell()

    def _measure(self, now: float) -> None:
        took = now - self._measured_at
        if took <= 0:
            return
        rate = max(0.0, (self.done - self._measured) / took)
        weight = min(1.0, took / _SMOOTHING_S)
        self._rate = rate if self._rate is None else self._rate + weight * (rate - self._rate)
        self._measured_at, self._measured = now, self.done

    def _tell(self) -> None:
        if self._report is None:
            return
        rest = None
        if self._rate and self._total is not None:
            rest = max(0.0, (self._total - self.done) / self._rate)
        self._report(TransferProgress(self._phase, self.what, self.done, self._total, self._rate, rest))
