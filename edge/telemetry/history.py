"""Keep a history in bounded memory: every second of ten minutes and every minute of a day."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

SECONDS = 600
MINUTES = 1440


class HistoryPoint(NamedTuple):
    """One row of the history. `at_s` is on the monotonic clock."""

    at_s: float
    power_w: float | None
    temp_c: float | None
    gpu_load_ratio: float | None
    memory_used_bytes: int | None
    tokens: int  # since telemetry started


@dataclass(slots=True)
class History:
    """Seconds, and minutes averaged from them."""

    seconds: deque[HistoryPoint] = field(default_factory=lambda: deque(maxlen=SECONDS))
    minutes: deque[HistoryPoint] = field(default_factory=lambda: deque(maxlen=MINUTES))
    _minute: list[HistoryPoint] = field(default_factory=list)

    def add(self, point: HistoryPoint) -> None:
        self.seconds.append(point)
        if self._minute and point.at_s // 60 != self._minute[0].at_s // 60:
            self.minutes.append(_mean(self._minute))
            self._minute.clear()
        self._minute.append(point)

    def rate(self, over_s: float = 10.0) -> float | None:
        """Return tokens per second over the last `over_s`; None without two rows."""
        if len(self.seconds) < 2:
            return None
        last = self.seconds[-1]
        first = next(point for point in self.seconds if point.at_s >= last.at_s - over_s)
        span = last.at_s - first.at_s
        return (last.tokens - first.tokens) / span if span > 0 else None


def _mean(points: list[HistoryPoint]) -> HistoryPoint:
    """Average each value over the rows that have it; of the temperature keep the maximum."""

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    temps = [m.temp_c for m in points if m.temp_c is not None]
    used = mean([float(m.memory_used_bytes) for m in points if m.memory_used_bytes is not None])
    return HistoryPoint(
        points[0].at_s,
        mean([m.power_w for m in points if m.power_w is not None]),
        max(temps, default=None),
        mean([m.gpu_load_ratio for m in points if m.gpu_load_ratio is not None]),
        None if used is None else int(used),
        points[-1].tokens,
    )
