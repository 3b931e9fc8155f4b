"""What was, in little memory: every second of ten minutes and every minute of a day."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

SECONDS = 600
MINUTES = 1440


class Moment(NamedTuple):
    """`at_s` is monotonic. Absent is None."""

    at_s: float
    power_w: float | None
    temp_c: float | None
    gpu_load_ratio: float | None
    memory_used_bytes: int | None
    tokens: int  # since telemetry began


@dataclass(slots=True)
class History:
    seconds: deque[Moment] = field(default_factory=lambda: deque(maxlen=SECONDS))
    minutes: deque[Moment] = field(default_factory=lambda: deque(maxlen=MINUTES))
    _minute: list[Moment] = field(default_factory=list)

    def add(self, moment: Moment) -> None:
        self.seconds.append(moment)
        if self._minute and moment.at_s // 60 != self._minute[0].at_s // 60:
            self.minutes.append(_mean(self._minute))
            self._minute.clear()
        self._minute.append(moment)

    def rate(self, over_s: float = 10.0) -> float | None:
        """Tokens per second over the last `over_s`."""
        if len(self.seconds) < 2:
            return None
        last = self.seconds[-1]
        first = next(moment for moment in self.seconds if moment.at_s >= last.at_s - over_s)
        span = last.at_s - first.at_s
        return (last.tokens - first.tokens) / span if span > 0 else None


def _mean(moments: list[Moment]) -> Moment:
    """The mean of each figure over the moments that have it; temperature is the highest."""

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    temps = [m.temp_c for m in moments if m.temp_c is not None]
    used = mean([float(m.memory_used_bytes) for m in moments if m.memory_used_bytes is not None])
    return Moment(
        moments[0].at_s,
        mean([m.power_w for m in moments if m.power_w is not None]),
        max(temps, default=None),
        mean([m.gpu_load_ratio for m in moments if m.gpu_load_ratio is not None]),
        None if used is None else int(used),
        moments[-1].tokens,
    )
