"""Power modes, clocks, temperatures, fan and throttling from sysfs, by name: hwmon numbers change at each boot."""

from __future__ import annotations

from edge.board import power
from edge.board.tree import Tree
from edge.doctor.facts import Clock, Heat, Power

_GPU_CLOCKS = ("gpu", "ga10b", "gv11b", "gp10b", "gb10b")
_ZONES, _DEVFREQ, _HWMON = "/sys/class/thermal", "/sys/class/devfreq", "/sys/class/hwmon"
_SANE_MILLI_C = (50_000, 130_000)  # a trip point outside of this is a placeholder
# States that a cooler takes to slow something down. A fan that turns is not one of them.
_THROTTLES = ("throttle", "cpufreq", "devfreq", ".gpu", ".ga10b", ".gv11b", "Processor")


def read(tree: Tree) -> Power:
    clocks = [
        _clock("GPU", tree, f"{_DEVFREQ}/{name}/", ("min_freq", "max_freq"), 1)
        for name in tree.children(_DEVFREQ)
        if any(word in name for word in _GPU_CLOCKS)
    ]
    names = ("scaling_min_freq", "scaling_max_freq")
    clocks.append(_clock("CPU", tree, "/sys/devices/system/cpu/cpu0/cpufreq/", names, 1000))
    return Power(
        modes=power.modes(tree.text("/etc/nvpmodel.conf") or ""),
        clocks=tuple(clock for clock in clocks if clock is not None),
    )


def _clock(name: str, tree: Tree, folder: str, files: tuple[str, str], factor: int) -> Clock | None:
    low, high = (tree.number(folder + file) for file in files)
    if low is None or high is None:
        return None
    return Clock(name, low * factor, high * factor)


def heat(tree: Tree) -> Heat:
    zones: dict[str, float] = {}
    trips: dict[str, list[int]] = {"passive": [], "critical": []}
    for entry in tree.children(_ZONES):
        folder = f"{_ZONES}/{entry}"
        if not entry.startswith("thermal_zone"):
            continue
        milli_c = tree.number(f"{folder}/temp")
        if milli_c is not None and milli_c > -100_000:  # -256 °C: a sensor that is switched off
            zones[_plain(tree.word(f"{folder}/type") or entry)] = milli_c / 1000
        for number in range(8):
            kind = tree.word(f"{folder}/trip_point_{number}_type")
            at = tree.number(f"{folder}/trip_point_{number}_temp")
            if kind in trips and at is not None and _SANE_MILLI_C[0] <= at <= _SANE_MILLI_C[1]:
                trips[kind].append(at)
    pwm, rpm = _fan(tree)
    return Heat(
        zones=zones,
        passive_c=min(trips["passive"]) / 1000 if trips["passive"] else None,
        critical_c=min(trips["critical"]) / 1000 if trips["critical"] else None,
        throttling=_throttling(tree),
        fan_pwm=pwm,
        fan_rpm=rpm,
        over_current_events=_over_current(tree),
    )


def _plain(zone: str) -> str:
    """JetPack 5 writes CPU-therm, JetPack 6 cpu-thermal."""
    return zone.lower().removesuffix("-thermal").removesuffix("-therm")


def _throttling(tree: Tree) -> tuple[str, ...]:
    found = []
    for entry in tree.children(_ZONES):
        kind = tree.word(f"{_ZONES}/{entry}/type") if entry.startswith("cooling_device") else None
        slowed = (tree.number(f"{_ZONES}/{entry}/cur_state") or 0) > 0
        if kind and slowed and any(word in kind for word in _THROTTLES):
            found.append(kind)
    return tuple(found)


def _fan(tree: Tree) -> tuple[int | None, int | None]:
    pwm = rpm = None
    for entry in tree.children(_HWMON):
        name = tree.word(f"{_HWMON}/{entry}/name")
        if name == "pwmfan":
            pwm = tree.number(f"{_HWMON}/{entry}/pwm1")
        elif name == "pwm_tach":
            rpm = tree.number(f"{_HWMON}/{entry}/rpm")
    return pwm, rpm


def _over_current(tree: Tree) -> int | None:
    for entry in tree.children(_HWMON):
        if tree.word(f"{_HWMON}/{entry}/name") == "soctherm_oc":
            return sum(tree.number(f"{_HWMON}/{entry}/oc{n}_event_cnt") or 0 for n in (1, 2, 3))
    return None
