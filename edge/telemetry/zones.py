"""Find thermal zones with their trip points, throttle alerts and over-current counters in sysfs."""

from __future__ import annotations

from dataclasses import dataclass

from edge.telemetry.nodes import children, read_int, read_text
from edge.telemetry.sample import Zone, celsius

# Trip points outside this range are placeholders of x86 firmware (0 and −274 °C), not limits.
_SANE_TRIP_C = (40.0, 150.0)

# Types of cooling devices that slow something down: `cpu-throttle-alert` (Orin, Thor), `cpufreq-cpu0`, `17000000.gpu`,
# `devfreq-gpu-gpc-0` (Thor), `Processor` (ACPI). A fan (`pwm-fan`, `Fan`) is none.
_THROTTLES = ("throttle", "cpufreq", "devfreq", ".gpu", ".ga10b", ".gv11b", "Processor")


@dataclass(frozen=True, slots=True)
class ZoneNode:
    """Path and trip points of one thermal zone."""

    name: str
    path: str
    passive_c: float | None
    critical_c: float | None

    def read(self) -> Zone:
        milli = read_int(self.path)
        temp = None if milli is None else celsius(milli / 1000)
        return Zone(self.name, temp, self.passive_c, self.critical_c)


def find_zones(sys: str) -> tuple[ZoneNode, ...]:
    """Find zones under `sys`. "cpu-thermal" (JetPack 6), "CPU" and "CPU-therm" (JetPack 5) all become `cpu`."""
    nodes: dict[str, ZoneNode] = {}
    for folder in children(f"{sys}/class/thermal", "thermal_zone"):
        kind = read_text(f"{folder}/type")
        if not kind:
            continue
        name = kind.lower().removesuffix("-thermal").removesuffix("-therm")
        while name in nodes:  # two packages of one machine have the same type
            name += "'"
        trips = _trips(folder)
        nodes[name] = ZoneNode(name, f"{folder}/temp", trips.get("passive"), trips.get("critical"))
    return tuple(nodes.values())


def _trips(folder: str) -> dict[str, float]:
    """Return the lowest plausible trip point of each type, in °C."""
    trips: dict[str, float] = {}
    for path in children(folder, "trip_point_"):
        if not path.endswith("_type"):
            continue
        kind, milli = read_text(path), read_int(f"{path.removesuffix('_type')}_temp")
        if kind and milli is not None and _SANE_TRIP_C[0] <= milli / 1000 <= _SANE_TRIP_C[1]:
            trips[kind] = min(trips.get(kind, milli / 1000), milli / 1000)
    return trips


def find_throttle_alerts(sys: str) -> tuple[tuple[str, str], ...]:
    """Return (type, cur_state path) of cooling devices that lower a clock; a fan is a cooling device too."""
    found = []
    for folder in children(f"{sys}/class/thermal", "cooling_device"):
        kind = read_text(f"{folder}/type")
        if kind and any(word in kind for word in _THROTTLES):
            found.append((kind, f"{folder}/cur_state"))
    return tuple(found)


def find_overcurrent(sys: str) -> tuple[tuple[str, str], ...]:
    """Return (oc1…oc3, path of its event counter since boot)."""
    return tuple(
        (path.rsplit("/", 1)[1].removesuffix("_event_cnt"), path)
        for hwmon in children(f"{sys}/class/hwmon", "hwmon")
        if read_text(f"{hwmon}/name") == "soctherm_oc"
        for path in children(hwmon, "oc")
        if path.endswith("_event_cnt")
    )
