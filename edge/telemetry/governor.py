"""Choose a thermal level from the board's own trip points, and limit requests by temperature and power. Pure.

    UNKNOWN    no temperature with a trip point is measured; nothing is limited
    NOMINAL    all requests are admitted
    PASSIVE    passive − 10 °C   fewer requests at once
    HOT        passive − 4 °C    new requests wait, running ones finish
    CRITICAL   critical − 2 °C   the engine is drained and stopped, and started again when it is cool

By temperature only PASSIVE acts unless `act` is set: the board protects itself in hardware, and an appliance that stops
without being configured to is worse than a slow one. `max_watts` acts by itself, see power_limit.py. Throttling by the
board and over-current are reported and never change a level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from msgspec import Struct, field

from edge.board.board import PowerMode
from edge.config.values import ThermalConfig
from edge.telemetry.power_limit import PowerAllowance, PowerLimit
from edge.telemetry.sample import Sample, Zone

# Between software throttling and shutdown: Orin 99.0 and 104.5 (NVIDIA's kernel patch for p3701), Thor about 109 and
# 114.5 (L4T R38.4).
_PASSIVE_BELOW_CRITICAL_C = 5.5
_CRITICAL_MARGIN_C = 2.0  # below the point at which the hardware shuts down
_HYSTERESIS_C = 3.0
DWELL_S = 10.0  # a level is kept at least this long before the next lower one
_STALE_S = 60.0  # without data for this long the level is UNKNOWN: missing data stops no model
_PASSIVE_FRACTION = 0.5  # of the slots
# No heat sink warms by so much between two samples; a glitch of a sensor's bus does.
_JUMP_C = 15.0
_NEVER_S = float("-inf")  # an instant before any other
NO_TEMPERATURE = "no temperature with a trip point"


class Level(IntEnum):
    """Thermal level of the board."""

    UNKNOWN = -1
    NOMINAL = 0
    PASSIVE = 1
    HOT = 2
    CRITICAL = 3


class AdmissionLimit(Struct, frozen=True):
    """Limit for gateway and supervisor. `fraction` of the slots, at least one, may be busy at once.

    `hold_new`: new requests wait, then get 503 with Retry-After. `drain`: finish or abort running requests and stop the
    engine until `drain` is false. `cause` is heat or power, "" without a limit.
    """

    fraction: float = 1.0
    hold_new: bool = False
    drain: bool = False
    cause: str = ""


class Decision(Struct, frozen=True):
    """A level and the limit that follows from temperature and power. `warning`: a limit that cannot be held."""

    level: Level
    limit: AdmissionLimit
    because: str
    changed: bool = False
    warning: str | None = None


class Governor:
    """The governor of one board, fed with every sample."""

    def __init__(self, config: ThermalConfig | None = None, dwell_s: float = DWELL_S) -> None:
        self.config = config or ThermalConfig()
        self.level = Level.UNKNOWN
        self._heat = _Heat(self.config, dwell_s)
        self._power = None if self.config.max_watts is None else PowerLimit(self.config.max_watts)
        self._state: PowerAllowance | None = None
        self._power_seen_s = _NEVER_S
        self._shown = _Shown()
        self._stopped = False

    def decide(self, sample: Sample | None, now: float, *, active: int = 0, slots: int = 1) -> Decision:
        """Return the decision for one sample, with `active` requests open of `slots`.

        A missing value keeps what followed from the last one for a minute.
        """
        heat = self._heat.step(sample, now)
        warning = self._step_power(sample, now, active, slots)
        power = _power_level(self._state)
        level = self._shown.step(max(heat, power), now)
        # The first temperature is no change of anything.
        changed = level is not self.level and (self.level, level) != (Level.UNKNOWN, Level.NOMINAL)
        self.level = level
        # A stopped engine starts again at PASSIVE, not at HOT, where it would be stopped again soon.
        self._stopped = heat >= Level.CRITICAL or (self._stopped and heat >= Level.HOT)
        because = self._state.because if self._state is not None and power > heat else self._heat.because
        return Decision(level, self._limit(heat, slots), because, changed, warning)

    def _step_power(self, sample: Sample | None, now: float, active: int, slots: int) -> str | None:
        """Follow `max_watts`; return a warning if it cannot be held."""
        if self._power is None:
            return None
        power_w = sample.power_w if sample else None
        if power_w is not None:
            self._power_seen_s = now
            self._state = self._power.step(power_w, active, slots, now)
        elif now - self._power_seen_s >= _STALE_S:
            self._state = None
            return f"max_watts = {self.config.max_watts:g} cannot be held: no total power is measured"
        if self._state is None or self._state.held:
            return None
        return f"max_watts = {self.config.max_watts:g} cannot be held: {self._state.because}"

    def _limit(self, heat: Level, slots: int) -> AdmissionLimit:
        """Combine the limits of temperature and power."""
        if heat <= Level.NOMINAL:
            limit = AdmissionLimit()
        elif heat is Level.PASSIVE or not self.config.act:
            limit = AdmissionLimit(_PASSIVE_FRACTION, cause="heat")
        else:
            limit = AdmissionLimit(_PASSIVE_FRACTION, hold_new=True, drain=self._stopped, cause="heat")
        allowed = None if self._state is None else self._state.allowed
        if allowed is None or limit.hold_new:
            return limit
        # A little more than allowed / slots: consumers round the product down.
        fraction = min(limit.fraction, round(allowed / slots + 0.0005, 4))
        cause = limit.cause if fraction == limit.fraction and allowed else "power"
        return AdmissionLimit(min(1.0, fraction), hold_new=allowed == 0, cause=cause if fraction < 1 else "")


def _power_level(state: PowerAllowance | None) -> Level:
    if state is None or not state.limited:
        return Level.UNKNOWN
    return Level.HOT if state.pauses else Level.PASSIVE


class _Heat(Struct):
    """Level by temperature."""

    config: ThermalConfig
    dwell_s: float
    level: Level = Level.UNKNOWN
    because: str = NO_TEMPERATURE
    since_s: float = _NEVER_S
    seen_s: float = _NEVER_S
    _before: dict[str, float] = field(default_factory=dict)  # the last temperature of each zone

    def step(self, sample: Sample | None, now: float) -> Level:
        """Return the level after one sample; one without zones keeps it for a minute."""
        zones = [zone for zone in sample.zones if _limiting(zone)] if sample else []
        if not zones:
            if now - self.seen_s >= _STALE_S:
                self._enter(Level.UNKNOWN, now)
                self.because = NO_TEMPERATURE
                self._before = {}
            return self.level
        self.seen_s = now
        wanted = max(self._rising(zone) for zone in zones)
        self._before = {zone.name: zone.temp_c or 0.0 for zone in zones}
        # Down one level at a time, and only when cooler than the threshold by the hysteresis.
        kept = max(self._of(zone, _HYSTERESIS_C) for zone in zones)
        if wanted > self.level:
            self._enter(wanted, now)
        elif kept < self.level and now - self.since_s >= self.dwell_s:
            self._enter(Level(self.level - 1), now)
        nearest = min(zones, key=lambda zone: _passive(zone) - (zone.temp_c or 0.0))
        self.because = f"{nearest.name} {nearest.temp_c:.1f} °C, passive at {_passive(nearest):.1f} °C"
        return self.level

    def _enter(self, level: Level, now: float) -> None:
        if level is not self.level:
            self.level, self.since_s = level, now

    def _rising(self, zone: Zone) -> Level:
        """Return the level of a zone; above PASSIVE a first temperature and a jump must be confirmed by the next."""
        before_c = self._before.get(zone.name)
        level = self._of(zone, 0.0)
        sudden = before_c is None or (zone.temp_c or 0.0) - before_c > _JUMP_C
        return min(Level.PASSIVE, level) if sudden else level

    def _of(self, zone: Zone, added_c: float) -> Level:
        temp, passive = (zone.temp_c or 0.0) + added_c, _passive(zone)
        if zone.critical_c is not None and temp >= zone.critical_c - _CRITICAL_MARGIN_C:
            return Level.CRITICAL
        if temp >= passive - self.config.act_margin_c:
            return Level.HOT
        return Level.PASSIVE if temp >= passive - self.config.warn_margin_c else Level.NOMINAL


# A level that returns within this time was left too early for an operator who reads levels and their log lines.
_FLAPPING_S = 300.0
_SHOWN_S = (40.0, 600.0)  # for how long a lower level must hold before it is shown, the first and the longest


class _Shown(Struct):
    """The reported level: it follows downwards more and more slowly if levels return, at most 20 changes an hour."""

    level: Level = Level.UNKNOWN
    _wait_s: float = 0.0
    _below_since_s: float | None = None
    _fell_s: float = _NEVER_S

    def step(self, level: Level, now: float) -> Level:
        if level >= self.level or level is Level.UNKNOWN:
            if level > self.level and now - self._fell_s < _FLAPPING_S:
                self._wait_s = min(_SHOWN_S[1], max(_SHOWN_S[0], 4 * self._wait_s))
            elif level > self.level:
                self._wait_s = 0.0
            self.level, self._below_since_s = level, None
            return level
        self._below_since_s = now if self._below_since_s is None else self._below_since_s
        if now - self._below_since_s >= self._wait_s:
            self.level, self._fell_s, self._below_since_s = level, now, None
        return self.level


def _limiting(zone: Zone) -> bool:
    """Return whether the zone's trip points limit requests now."""
    return zone.limits and zone.temp_c is not None and _passive(zone) > 0


def _passive(zone: Zone) -> float:
    """Return the zone's software-throttle point; 0.0 for one without trip points (board and diode sensors)."""
    if zone.passive_c is not None:
        return zone.passive_c
    return 0.0 if zone.critical_c is None else zone.critical_c - _PASSIVE_BELOW_CRITICAL_C


# Choose what is logged: the power mode and clocks, and throttling that starts or ends. Pure.

THROTTLED_QUIET_S = 10.0  # a board at its limit throttles and stops several times a second
OVERCURRENT_QUIET_S = 60.0  # some healthy boards count events all the time (7.6 a second on an Orin Nano)


class Debouncer(Struct):
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


class ChangeReporter(Struct):
    """Log lines of one board, from every sample."""

    _throttled: Debouncer = field(default_factory=lambda: Debouncer(THROTTLED_QUIET_S))
    _overcurrent: Debouncer = field(default_factory=lambda: Debouncer(OVERCURRENT_QUIET_S))
    _supply: Debouncer = field(default_factory=lambda: Debouncer(OVERCURRENT_QUIET_S))
    _counts: Mapping[str, int] = field(default_factory=dict)
    _mode: tuple[PowerMode, bool | None] | None = None

    def warnings(self, sample: Sample, now: float, tokens_per_s: float | None) -> list[str]:
        lines = []
        throttled = self._throttled.step(sample.throttled, now)
        if throttled is not None:
            speed = f", {tokens_per_s:.1f} tokens/s" if tokens_per_s else ""
            lines.append(f"throttled by the board itself: {', '.join(throttled) or 'no longer'}{speed}")
        supply = self._supply.step(sample.supply, now)
        if supply is not None:
            lines.append(", ".join(supply) or "power supply: no trouble any more")
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
