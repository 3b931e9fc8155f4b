"""What is worth a line in the log: the power mode and clocks, and throttling that begins or ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edge.board.board import PowerMode
from edge.telemetry.sample import Sample

THROTTLED_QUIET_S = 10.0  # a board at its limit throttles and lets go several times a second
OVERCURRENT_QUIET_S = 60.0  # some healthy boards count events all the time: that is one line


@dataclass(slots=True)
class Spell:
    """Something that comes and goes, told once: it is over when it was away for `quiet_s`."""

    quiet_s: float
    reasons: tuple[str, ...] = ()
    _seen_s: float = 0.0

    def step(self, reasons: Iterable[str], now: float) -> tuple[str, ...] | None:
        """All reasons so far when it begins or another one joins, () when it is over, None when there is no news."""
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
class News:
    """Of one board. Feed it every sample."""

    _throttled: Spell = field(default_factory=lambda: Spell(THROTTLED_QUIET_S))
    _overcurrent: Spell = field(default_factory=lambda: Spell(OVERCURRENT_QUIET_S))
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
        """At the start and whenever somebody changed it: what the figures that follow were measured with."""
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
