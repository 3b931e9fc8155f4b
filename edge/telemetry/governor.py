"""Choose a thermal level from the board's own trip points, with hysteresis and dwell times. Pure.

    NOMINAL    all requests are admitted
    PASSIVE    passive − 10 °C   fewer requests at once
    HOT        passive − 4 °C    new requests wait, running ones finish
    CRITICAL   critical − 2 °C   the engine is drained and stopped, and started again when it is cool

Only PASSIVE acts unless `act` is set: the board protects itself in hardware, and an appliance that stops without being
configured to is worse than a slow one. Throttling by the board and over-current are reported and never change a level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from edge.board.board import PowerMode
from edge.telemetry.sample import Sample, Zone

# Between software throttling and shutdown: Orin 99.0 and 104.5 (NVIDIA's kernel patch for p3701), Thor about 109 and
# 114.5 (L4T R38.4).
_PASSIVE_BELOW_CRITICAL_C = 5.5
_NEVER_S = float("-inf")


class Level(IntEnum):
    """Thermal level of the board."""

    NOMINAL = 0
    PASSIVE = 1
    HOT = 2
    CRITICAL = 3


@dataclass(frozen=True, slots=True)
class ThermalLimits:
    """Limits of the governor, see [thermal]. Margins are in °C below a zone's trip point."""

    act: bool = False
    max_watts: float | None = None
    passive_margin_c: float = 10.0
    hot_margin_c: float = 4.0
    critical_margin_c: float = 2.0
    hysteresis_c: float = 3.0
    dwell_s: float = 10.0  # a level is kept at least this long before the next lower one
    stale_s: float = 60.0  # without data for this long the level becomes NOMINAL: missing data stops no model
    average_s: float = 10.0  # of power, before it is compared with max_watts
    passive_fraction: float = 0.5


@dataclass(frozen=True, slots=True)
class AdmissionLimit:
    """Limit for gateway and supervisor. `fraction` of the slots, at least one, may be busy at once.

    `hold_new`: new requests wait, then get 503 with Retry-After. `drain`: finish or abort running requests and stop the
    engine until `drain` is false.
    """

    fraction: float = 1.0
    hold_new: bool = False
    drain: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """A level and the limit that follows from it, at most that of PASSIVE unless `act`."""

    level: Level
    limit: AdmissionLimit
    because: str
    changed: bool = False


@dataclass(slots=True)
class Governor:
    """The governor of one board: fed with every sample, it keeps levels and when they were entered."""

    limits: ThermalLimits = field(default_factory=ThermalLimits)
    level: Level = Level.NOMINAL
    _heat: _Heat = field(init=False)
    _watts: _Watts = field(init=False)
    _stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._heat, self._watts = _Heat(self.limits), _Watts(self.limits)

    def decide(self, sample: Sample | None, now: float) -> Decision:
        """Return the decision for one sample. A missing value keeps the level it led to for `stale_s`."""
        heat, watts = self._heat.step(sample, now), self._watts.step(sample, now)
        level = max(heat, watts)
        changed, self.level = level != self.level, level
        # A stopped engine starts again at PASSIVE, not at HOT, where it would be stopped again soon.
        self._stopped = level >= Level.CRITICAL or (self._stopped and level >= Level.HOT)
        because = self._watts.because if watts > heat else self._heat.because
        return Decision(level, self._limit(level), because, changed)

    def _limit(self, level: Level) -> AdmissionLimit:
        if level is Level.NOMINAL:
            return AdmissionLimit()
        if level is Level.PASSIVE or not self.limits.act:
            return AdmissionLimit(self.limits.passive_fraction)
        return AdmissionLimit(self.limits.passive_fraction, hold_new=True, drain=self._stopped)


@dataclass(slots=True)
class _Heat:
    """Level by temperature."""

    limits: ThermalLimits
    level: Level = Level.NOMINAL
    because: str = "no temperature with a trip point"
    since_s: float = _NEVER_S
    seen_s: float = _NEVER_S

    def step(self, sample: Sample | None, now: float) -> Level:
        zones = tuple(zone for zone in sample.zones if zone.temp_c is not None and _passive(zone)) if sample else ()
        if not zones:
            if now - self.seen_s >= self.limits.stale_s:
                self._enter(Level.NOMINAL, now)
                self.because = "no temperature with a trip point"
            return self.level
        self.seen_s = now
        wanted = max(self._of(zone, 0.0) for zone in zones)
        # Down one level at a time, and only when cooler than the threshold by the hysteresis.
        kept = max(self._of(zone, self.limits.hysteresis_c) for zone in zones)
        if wanted > self.level:
            self._enter(wanted, now)
        elif kept < self.level and now - self.since_s >= self.limits.dwell_s:
            self._enter(Level(self.level - 1), now)
        nearest = min(zones, key=lambda zone: _passive(zone) - (zone.temp_c or 0.0))
        self.because = f"{nearest.name} {nearest.temp_c:.1f} °C, passive at {_passive(nearest):.1f} °C"
        return self.level

    def _enter(self, level: Level, now: float) -> None:
        if level is not self.level:
            self.level, self.since_s = level, now

    def _of(self, zone: Zone, hysteresis_c: float) -> Level:
        temp, passive = (zone.temp_c or 0.0) + hysteresis_c, _passive(zone)
        if zone.critical_c is not None and temp >= zone.critical_c - self.limits.critical_margin_c:
            return Level.CRITICAL
        if temp >= passive - self.limits.hot_margin_c:
            return Level.HOT
        return Level.PASSIVE if temp >= passive - self.limits.passive_margin_c else Level.NOMINAL


@dataclass(slots=True)
class _Watts:
    """Level by power: above `max_watts` one up a dwell time, HOT at most; below 95 % of it one down."""

    limits: ThermalLimits
    level: Level = Level.NOMINAL
    because: str = ""
    average_w: float | None = None
    since_s: float = _NEVER_S
    seen_s: float = _NEVER_S

    def step(self, sample: Sample | None, now: float) -> Level:
        wanted, power = self.limits.max_watts, sample.power_w if sample else None
        if wanted is None or power is None:
            if wanted is None or now - self.seen_s >= self.limits.stale_s:
                self.level, self.average_w = Level.NOMINAL, None
            return self.level
        average = power if self.average_w is None else self.average_w
        weight = min(1.0, (now - self.seen_s) / self.limits.average_s)
        self.average_w, self.seen_s = average + weight * (power - average), now
        step = 1 if self.average_w > wanted else -1 if self.average_w < 0.95 * wanted else 0
        level = Level(min(Level.HOT, max(Level.NOMINAL, self.level + step)))
        if level is not self.level and now - self.since_s >= self.limits.dwell_s:
            self.level, self.since_s = level, now
        self.because = f"{self.average_w:.0f} W, limit {wanted:.0f} W"
        return self.level


def _passive(zone: Zone) -> float:
    """Return the zone's software-throttle point; 0.0 for one without trip points (board and diode sensors)."""
    if zone.passive_c is not None:
        return zone.passive_c
    return 0.0 if zone.critical_c is None else zone.critical_c - _PASSIVE_BELOW_CRITICAL_C


# Choose what is logged: the power mode and clocks, and throttling that starts or ends. Pure.

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
