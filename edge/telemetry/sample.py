"""What sensors said at one instant. Values only; absent is None, never −256 and never 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from edge.board.board import PowerMode

# jtop's and the kernel's word for a sensor whose rail is off. Real sub-zero values are kept.
OFFLINE_C = -256.0


@dataclass(frozen=True, slots=True)
class Rail:
    name: str  # the board's own label: "VDD_IN", "VIN_SYS_5V0"
    power_w: float
    voltage_v: float | None = None
    current_a: float | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """The figure that counts. `rail` names it: one rail, "sum of rails" or "sum of GPUs"; `parts` are what it is of."""

    power_w: float
    rail: str
    parts: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Zone:
    """One temperature with its trip points. `temp_c` None: gated or unreadable now."""

    name: str  # lower case, without "-thermal": "tj", "cpu", "gpu", "soc0"; a GPU's UUID for discrete ones
    temp_c: float | None
    passive_c: float | None = None
    critical_c: float | None = None


@dataclass(frozen=True, slots=True)
class GpuState:
    name: str
    uuid: str | None = None  # None: the board's integrated GPU
    load_ratio: float | None = None
    clock_hz: float | None = None
    max_clock_hz: float | None = None
    temp_c: float | None = None
    power_w: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryState:
    """MemAvailable, never MemFree."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int = 0
    swap_used_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.available_bytes


@dataclass(frozen=True, slots=True)
class Fan:
    speed_ratio: float | None = None
    rpm: int | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    name: str
    gpu_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One source's view, or several merged: `source` is where power and temperature came from, `at_by_source` has all.

    `at_s` is on the monotonic clock. `throttled` names what the board itself slows down for, heat and power alike;
    `overcurrent` counts events since telemetry began: reported, not judged (some healthy boards count all the time).
    """

    at_s: float
    source: str
    power: Power | None = None
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
    overcurrent: Mapping[str, int] = field(default_factory=dict)
    power_mode: PowerMode | None = None
    jetson_clocks: bool | None = None
    at_by_source: Mapping[str, float] = field(default_factory=dict)

    def age_s(self, now: float) -> float:
        return max(0.0, now - self.at_s)

    @property
    def power_w(self) -> float | None:
        return self.power.power_w if self.power else None

    @property
    def temp_c(self) -> float | None:
        """The hottest zone; Jetson's `tj` is the kernel's own maximum."""
        return max((zone.temp_c for zone in self.zones if zone.temp_c is not None), default=None)

    @property
    def gpu_load_ratio(self) -> float | None:
        """The busiest GPU."""
        return max((gpu.load_ratio for gpu in self.gpus if gpu.load_ratio is not None), default=None)


def celsius(value: float) -> float | None:
    """A temperature, or None for the sentinel of a sensor that is off."""
    return None if value <= OFFLINE_C else value


def merge(parts: Iterable[Sample]) -> Sample | None:
    """One sample from several, best source first: each field comes from the first part that has it.

    Zones are joined by name (a zone file that reads wins over another source's sentinel), GPUs by UUID, so that jtop
    can add what sysfs could not read. `source` is the first part that knows power, else temperature, else
    the last one.
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
        at_by_source={p.source: p.at_s for p in ordered},
        throttled=tuple(dict.fromkeys(reason for p in ordered for reason in p.throttled)),
    )
    for part in ordered[1:]:
        merged = _fill(merged, part)
    return merged


_T = TypeVar("_T", Zone, GpuState)
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
    """Absent fields of `into` from `part`. Rails travel with the power that was made of them."""
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
    """Integrated GPUs are one and the same whatever a source calls it (`gpu`, `ga10b`, "Thor")."""
    gpus: dict[str | None, GpuState] = {}
    for gpu in (gpu for part in parts for gpu in part.gpus):
        known = gpus.get(gpu.uuid)
        gpus[gpu.uuid] = gpu if known is None else _join(known, gpu)
    return tuple(gpus.values())


def _join(known: _T, other: _T) -> _T:
    """`known` with its gaps filled from `other`."""
    gaps = {f.name: getattr(other, f.name) for f in fields(known) if getattr(known, f.name) is None}
    return replace(known, **gaps)
