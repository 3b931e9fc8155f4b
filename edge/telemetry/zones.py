"""Thermal zones with their trip points, throttle alerts of cooling devices, and over-current counters."""

from __future__ import annotations

from dataclasses import dataclass

from edge.telemetry.nodes import children, read_int, read_text
from edge.telemetry.sample import Zone, celsius

# Trip points outside this are placeholders of x86 firmware (0, -274), not limits.
_SANE_TRIP_C = (40.0, 150.0)


@dataclass(frozen=True, slots=True)
class ZoneNode:
    name: str
    path: str
    passive_c: float | None
    critical_c: float | None

    def read(self) -> Zone:
        milli = read_int(self.path)
        temp = None if milli is None else celsius(milli / 1000)
        return Zone(self.name, temp, self.passive_c, self.critical_c)


def find_zones(sys: str) -> tuple[ZoneNode, ...]:
    """Zones under `sys`, by type: "cpu-thermal" (JetPack 6), "CPU" (JetPack 5) and "CPU-therm" all are `cpu`."""
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
    """The lowest sane trip of each type, in °C."""
    trips: dict[str, float] = {}
    for path in children(folder, "trip_point_"):
        if not path.endswith("_type"):
            continue
        kind, milli = read_text(path), read_int(f"{path.removesuffix('_type')}_temp")
        if kind and milli is not None and _SANE_TRIP_C[0] <= milli / 1000 <= _SANE_TRIP_C[1]:
            trips[kind] = min(trips.get(kind, milli / 1000), milli / 1000)
    return trips


def find_throttle_alerts(sys: str) -> tuple[tuple[str, str], ...]:
    """(type, cur_state path) of cooling devices that mean "slowed down". A fan is cooling, not throttling."""
    found = []
    for folder in children(f"{sys}/class/thermal", "cooling_device"):
        kind = read_text(f"{folder}/type")
        if kind and kind.endswith("-throttle-alert"):
            found.append((kind, f"{folder}/cur_state"))
    return tuple(found)


def find_overcurrent(sys: str) -> tuple[tuple[str, str], ...]:
    """(oc1…oc3, path of its event counter since boot)."""
    return tuple(
        (path.rsplit("/", 1)[1].removesuffix("_event_cnt"), path)
        for hwmon in children(f"{sys}/class/hwmon", "hwmon")
        if read_text(f"{hwmon}/name") == "soctherm_oc"
        for path in children(hwmon, "oc")
        if path.endswith("_event_cnt")
    )
