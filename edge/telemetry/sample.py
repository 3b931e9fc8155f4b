"""Values of sensors at one instant. An absent value is None, never −256 and never 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import fields, replace

from edge.board.board import PowerMode

# jtop and tegrastats print this for a sensor whose rail is off (FC-62). Real values below zero are kept.
OFFLINE_C = -256.0
# Below the coldest industrial range; above the highest trip point (Thor, 114.5 °C), at which hardware cuts the power.
PLAUSIBLE_C = (-60.0, 125.0)


class Rail(Struct, frozen=True):
    """Power of one supply rail."""

    name: str  # the board's own label: "VDD_IN", "VIN_SYS_5V0"
    power_w: float
    voltage_v: float | None = None
    current_a: float | None = None


class PowerState(Struct, frozen=True):
    """Total power. `rail` names its origin: one rail, "sum of rails" or "sum of GPUs"; `parts` are its summands."""

    power_w: float
    rail: str
    parts: tuple[str, ...] = ()
    note: str | None = None


class Zone(Struct, frozen=True):
    """A temperature with its trip points. `temp_c` is None while the sensor is gated or unreadable."""

    name: str  # lower case, without "-thermal": "tj", "cpu", "gpu", "soc0"; a GPU's UUID for discrete ones
    temp_c: float | None
    passive_c: float | None = None
    critical_c: float | None = None
    limits: bool = True  # its trip points are those of the processor: a PC's ACPI zones may be of a case or a drive


class GpuState(Struct, frozen=True):
    """A GPU at one instant."""

    name: str
    uuid: str | None = None  # None: the board's integrated GPU
    load_ratio: float | None = None
    clock_hz: float | None = None
    max_clock_hz: float | None = None
    temp_c: float | None = None
    power_w: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class MemoryState(Struct, frozen=True):
    """The machine's memory: MemAvailable, never MemFree, which counts the page cache as used (FC-17)."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int = 0
    swap_used_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return max(0, self.total_bytes - self.available_bytes)


class Fan(Struct, frozen=True):
    """A fan: PWM duty and measured speed."""

    speed_ratio: float | None = None
    rpm: int | None = None


class GpuProcess(Struct, frozen=True):
    """A process with GPU memory."""

    pid: int
    name: str
    gpu_memory_bytes: int | None = None


class Sample(Struct, frozen=True):
    """The values of one source, or of several merged; `source` is then where power and temperature came from.

    `at_s` is on the monotonic clock. `throttled` names the reasons for which the board itself lowers its clocks;
    `overcurrent` counts events since telemetry started and is only reported: some healthy boards count all the time.
    """

    at_s: float
    source: str
    power: PowerState | None = None
    rails: tuple[Rail, ...] = ()
    zones: tuple[Zone, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    gpu_processes: tuple[GpuProcess, ...] = ()
    memory: MemoryState | None = None
    gpu_used_bytes: int | None = None  # the integrated GPU's part of the same memory
    cpu_load_ratio: float | None = None
    emc_load_ratio: float | None = None
    emc_clock_hz: float | None = None
    fan: Fan | None = None
    disk_free_bytes: int | None = None
    throttled: tuple[str, ...] = ()
    supply: tuple[str, ...] = ()  # trouble of the power supply: alarms of the sensors' chips, a sagging 5 V rail
    notes: tuple[str, ...] = ()  # why a value is missing
    overcurrent: Mapping[str, int] = field(default_factory=dict)
    power_mode: PowerMode | None = None
    jetson_clocks: bool | None = None

    def age_s(self, now: float) -> float:
        return max(0.0, now - self.at_s)

    @property
    def power_w(self) -> float | None:
        return self.power.power_w if self.power else None

    @property
    def temp_c(self) -> float | None:
        """Return the hottest zone; `tj` of a Jetson is the maximum of its junction sensors."""
        return max((zone.temp_c for zone in self.zones if zone.temp_c is not None), default=None)

    @property
    def gpu_load_ratio(self) -> float | None:
        """Return the load of the busiest GPU."""
        return max((gpu.load_ratio for gpu in self.gpus if gpu.load_ratio is not None), default=None)


def celsius(value: float) -> float | None:
    """Return a temperature; None for a sensor that is off or reports what no running board has (127, 45 000)."""
    return value if PLAUSIBLE_C[0] <= value <= PLAUSIBLE_C[1] else None


# The widest range of a value on any machine, by the end of its field's name: a driver that does not know gives -1 or
# all ones, a faulty bus gives anything. 20 kW: eight GPUs of the largest kind; 2^60 bytes: network file systems.
_RANGES = {
    "_ratio": (0.0, 1.0),
    "_hz": (0.0, 1e11),
    "_w": (0.0, 2e4),
    "_v": (0.0, 1e3),
    "_a": (-1e3, 1e3),
    "_bytes": (0.0, 2.0**60),
    "rpm": (0.0, 1e5),
}
_S = TypeVar("_S", bound=Struct)


def plausible(sample: Sample) -> Sample:
    """Return the sample without values that no machine has: each costs its field, or its row where that needs it."""
    return replace(
        _checked(sample) or sample,
        power=sample.power and _checked(sample.power),
        rails=tuple(rail for each in sample.rails if (rail := _checked(each))),
        gpus=tuple(gpu for each in sample.gpus if (gpu := _checked(each))),
        gpu_processes=tuple(process for each in sample.gpu_processes if (process := _checked(each))),
        memory=sample.memory and _checked(sample.memory),
        fan=sample.fan and _checked(sample.fan),
    )


def _checked(row: _S) -> _S | None:
    """Return a row with implausible optional values absent; None if one is implausible that cannot be absent."""
    wrong: dict[str, None] = {}
    for name, low, high, optional in _bounds(type(row)):
        value = getattr(row, name)
        if value is not None and not low <= value <= high:
            if not optional:
                return None
            wrong[name] = None
    return replace(row, **wrong) if wrong else row


@lru_cache(maxsize=16)
def _bounds(kind: type[Struct]) -> tuple[tuple[str, float, float, bool], ...]:
    """Return (name, lowest, highest, whether it may be absent) of each number of a row."""
    return tuple(
        (each.name, *limits, each.default is None)
        for each in fields(kind)
        for end, limits in _RANGES.items()
        if each.name.endswith(end)
    )


def merge(parts: Iterable[Sample]) -> Sample | None:
    """Merge samples, best source first: each field comes from the first part that has it.

    Zones are joined by name and GPUs by UUID, so that jtop fills in what sysfs cannot read. `source` is the first part
    with power, else with a temperature, else the last. Returns None without parts.
    """
    ordered = list(parts)
    if not ordered:
        return None
    main = next((p for p in ordered if p.power), None) or next(
        (p for p in ordered if p.temp_c is not None), ordered[-1]
    )
    merged = replace(
        ordered[0],
        source=main.source,
        at_s=main.at_s,
        zones=_join_zones(ordered),
        gpus=_join_gpus(ordered),
        throttled=tuple(dict.fromkeys(reason for p in ordered for reason in p.throttled)),
        supply=tuple(dict.fromkeys(trouble for p in ordered for trouble in p.supply)),
        notes=tuple(dict.fromkeys(note for p in ordered for note in p.notes)),
    )
    for part in ordered[1:]:
        merged = _fill(merged, part)
    return merged


_T = TypeVar("_T", Zone, GpuState)
# `rails` are not among them: they belong to the source of `power`.
_FILLED = (
    "power",
    "gpu_processes",
    "memory",
    "gpu_used_bytes",
    "cpu_load_ratio",
    "emc_load_ratio",
    "emc_clock_hz",
    "fan",
    "disk_free_bytes",
    "power_mode",
    "jetson_clocks",
    "overcurrent",
)


def _fill(into: Sample, part: Sample) -> Sample:
    """Fill absent fields of `into` from `part`. Rails come from the source of the power that was summed from them."""
    gaps = {name: getattr(part, name) for name in _FILLED if _absent(getattr(into, name))}
    if "power" in gaps:
        gaps["rails"] = part.rails
    return replace(into, **gaps)


def _absent(value: object) -> bool:
    return value is None or value == () or value == {}


def _join_zones(parts: list[Sample]) -> tuple[Zone, ...]:
    zones: dict[str, Zone] = {}
    for zone in (zone for part in parts for zone in part.zones):
        known = zones.get(zone.name)
        zones[zone.name] = zone if known is None else _join(known, zone)
    return tuple(zones.values())


def _join_gpus(parts: list[Sample]) -> tuple[GpuState, ...]:
    """Join GPUs by UUID. The integrated GPU has none: sources call it `gpu`, `ga10b` or "Thor"."""
    gpus: dict[str | None, GpuState] = {}
    for gpu in (gpu for part in parts for gpu in part.gpus):
        known = gpus.get(gpu.uuid)
        gpus[gpu.uuid] = gpu if known is None else _join(known, gpu)
    return tuple(gpus.values())


def _join(known: _T, other: _T) -> _T:
    """Fill absent fields of `known` from `other`."""
    gaps = {f.name: getattr(other, f.name) for f in fields(known) if getattr(known, f.name) is None}
    return replace(known, **gaps)


# Keep a history in bounded memory: every second of ten minutes and every minute of a day.

SECONDS = 600  # ten minutes: the width of the status page's curves
MINUTES = 1440  # a day


class HistoryPoint(NamedTuple):
    """One row of the history. `at_s` is on the monotonic clock."""

    at_s: float
    power_w: float | None
    temp_c: float | None
    gpu_load_ratio: float | None
    memory_used_bytes: int | None
    tokens: int  # since telemetry started


class History(Struct):
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
