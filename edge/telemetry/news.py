"""Choose what is logged: the power mode and clocks, and throttling that starts or ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edge.board.board import PowerMode
from edge.telemetry.sample import Sample

THROTTLED_QUIET_S = 10.0  # a board at its limit throttles and stops several times a second
OVERCURRENT_QUIET_S = 60.0  # some healthy boards count events all the time (7.6 a second on an Orin Nano)


@dataclass(slots=True)
class Debouncer:
    """A condition that comes and goes; it has ended when it was absent for `quiet_s`."""

    quiet_s: float
    reasons: tuple[str, ...] = ()
    _seen_s: float = 0.0

    def step(self, reasons: Iterable[str], now: float) -> tuple[str, ...] | None:
        """Return all reasons when the condition starts or one is added, () when it ends, None without a change."""
        joined = tuple(dict.fromkeys((*self.reasons, *(found := tuple(reasons)))))
        if found:
            self._seen_s = now
        elif self.reasons and now - self._seen_s >= self.quiet_s:
            joined = ()
        if joined == self.reasons:
            return None
        self.reasons = joined
        return joined


@dataclass(slots=True)
class ChangeReporter:
    """Log lines of one board, from every sample."""

    _throttled: Debouncer = field(default_factory=lambda: Debouncer(THROTTLED_QUIET_S))
    _overcurrent: Debouncer = field(default_factory=lambda: Debouncer(OVERCURRENT_QUIET_S))
    _counts: Mapping[str, int] = field(default_factory=dict)
    _mode: tuple[PowerMode, bool | None] | None = None

    def warnings(self, sample: Sample, now: float, tokens_per_s: float | None) -> list[str]:
        lines = []
        throttled = self._throttled.step(sample.throttled, now)
        if throttled is not None:
            speed = f", {tokens_per_s:.1f} tokens/s" if tokens_per_s else ""
            lines.append(f"throttled by the board itself: {', '.join(throttled) or 'no longer'}{speed}")
        risen = [name for name, count in sample.overcurrent.items() if count > self._counts.get(name, 0)]
        self._counts = {**self._counts, **sample.overcurrent}
        overcurrent = self._overcurrent.step(risen, now)
        if overcurrent is not None:
            lines.append(f"over-current: {', '.join(overcurrent) or 'no longer'}")
        return lines

    def mode(self, sample: Sample) -> str | None:
        """Return a sentence on power mode and clocks, first and after each change; else None."""
        if sample.power_mode is None or (now := (sample.power_mode, sample.jetson_clocks)) == self._mode:
            return None
        self._mode = now
        parts = [f"power mode {sample.power_mode.name}"]
        parts += [
            f"{gpu.name.replace('gpu', 'GPU')} at most {_mhz(gpu.max_clock_hz)}"
            for gpu in sample.gpus
            if gpu.max_clock_hz
        ]
        parts += [f"memory controller {_mhz(sample.emc_clock_hz)}"] if sample.emc_clock_hz else []
        parts += [f"clocks {'locked' if sample.jetson_clocks else 'not locked'}"] if now[1] is not None else []
        return ", ".join(parts)


def _mhz(hertz: float) -> str:
    return f"{hertz / 1e6:.0f} MHz"
