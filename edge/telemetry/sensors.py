"""Read GPU load and clocks, memory controller, fan, power mode and locked clocks of a Jetson from files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from edge.board import jetson, memory
from edge.board.board import PowerMode
from edge.board.tables import Sensors
from edge.telemetry.sample import Fan, GpuState, MemoryState, PowerState, Rail, Zone, celsius

# Read small files of sysfs and procfs without blocking and without raising.

# Non-blocking: a power-gated zone answers EAGAIN (FC-62), and a FIFO or a dead device must not block the reader.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_BYTES = 65536  # no file of sysfs is longer than a page; /proc/meminfo has 1.5 kB
_MOST_DIGITS = 19  # with a sign; the kernel prints 64 bits, and int() of more overflows a float


def read_bytes(path: str) -> bytes | None:
    """Return the file's bytes (64 KiB at most); None where it cannot be read now, for any reason."""
    try:
        handle = os.open(path, _FLAGS)
    except (OSError, ValueError):
        return None
    try:
        return os.read(handle, _MOST_BYTES)
    except OSError:  # EAGAIN of a gated rail, EIO of an I2C fault, ENODEV
        return None
    finally:
        os.close(handle)


def read_text(path: str) -> str | None:
    """Return the text without surrounding white space and NULs (device-tree strings end in one)."""
    data = read_bytes(path)
    return None if data is None else data.decode("utf-8", "replace").strip(" \t\r\n\0")


def read_int(path: str) -> int | None:
    """Return the integer; None for an empty, malformed or unreadable file, and for one of more than 18 digits."""
    data = read_bytes(path)
    try:
        return None if data is None or len(data.strip()) > _MOST_DIGITS else int(data)
    except ValueError:
        return None


def children(path: str, prefix: str = "") -> list[str]:
    """Return paths in a folder whose names start with `prefix`, in numeric order; [] without the folder."""
    try:
        names = [entry.name for entry in Path(path).iterdir() if entry.name.startswith(prefix)]
    except OSError:
        return []
    return [f"{path}/{name}" for name in sorted(names, key=lambda name: (len(name), name))]


# Device-tree names of integrated GPUs: Xavier, TX2, Orin, Thor; JetPack 6 and later say "gpu".
_GPU_NODES = ("gv11b", "gp10b", "ga10b", "gb10b")


class GpuNode(Struct, frozen=True):
    """devfreq folder and load file of the integrated GPU."""

    name: str
    devfreq: str
    load: str | None  # permille

    def read(self) -> GpuState:
        permille = read_int(self.load) if self.load else None
        return GpuState(
            self.name,
            load_ratio=None if permille is None or not 0 <= permille <= 1000 else permille / 1000,
            clock_hz=read_int(f"{self.devfreq}/cur_freq"),
            max_clock_hz=read_int(f"{self.devfreq}/max_freq"),
        )

    def locked(self) -> bool | None:
        """Return whether min_freq equals max_freq, as jetson_clocks sets them."""
        low, high = read_int(f"{self.devfreq}/min_freq"), read_int(f"{self.devfreq}/max_freq")
        return None if low is None or high is None else low == high


def find_gpu(sys: str) -> GpuNode | None:
    """Find the integrated GPU's devfreq node; None while it is absent, which it may be early in the boot (FC-71)."""
    for devfreq in children(f"{sys}/class/devfreq"):
        name = devfreq.rpartition("/")[2]
        node = (read_text(f"{devfreq}/device/of_node/name") or "").lower()
        if "gpu" in node or node in _GPU_NODES or name.startswith("gpu-gpc"):
            candidates = (f"{devfreq}/device/load", f"{sys}/devices/platform/gpu.0/load", f"{sys}/devices/gpu.0/load")
            load = next((path for path in candidates if Path(path).exists()), None)
            return GpuNode("gpu", devfreq, load)
    return None


def read_emc(sys: str) -> tuple[float | None, float | None]:
    """Return (load ratio, clock in Hz) of the memory controller; (None, None) without root: it is in debugfs."""
    rate = read_int(f"{sys}/kernel/debug/bpmp/debug/clk/emc/rate")
    busy = read_int(f"{sys}/kernel/debug/cactmon/mc_all")  # kHz × percent
    if not rate:
        return None, None
    load = None if busy is None else min(1.0, busy * 1000 / rate / 100)
    return load, float(rate)


def find_fan(sys: str) -> tuple[str | None, str | None]:
    """Return the paths of the fan's PWM duty and speed."""
    pwm = rpm = None
    for hwmon in children(f"{sys}/class/hwmon", "hwmon"):
        kind = read_text(f"{hwmon}/name")
        if kind == "pwmfan":
            pwm = f"{hwmon}/pwm1"
        elif kind == "pwm_tach":
            rpm = f"{hwmon}/rpm"
    return pwm, rpm


def read_fan(nodes: tuple[str | None, str | None]) -> Fan | None:
    pwm, rpm = (read_int(path) if path else None for path in nodes)
    if pwm is None and rpm is None:
        return None
    return Fan(None if pwm is None else pwm / 255, rpm)


def read_power_mode(root: str) -> PowerMode | None:
    """Read nvpmodel's active mode from its files, without running it."""
    return jetson.active(read_text(f"{root}/var/lib/nvpmodel/status"), read_text(f"{root}/etc/nvpmodel.conf"))


def cpu_locked(sys: str) -> bool | None:
    """Return whether scaling_min_freq equals scaling_max_freq on every online core; None without cpufreq."""
    states = []
    for cpu in children(f"{sys}/devices/system/cpu", "cpu"):
        low, high = read_int(f"{cpu}/cpufreq/scaling_min_freq"), read_int(f"{cpu}/cpufreq/scaling_max_freq")
        if low is not None and high is not None:
            states.append(low == high)
    return all(states) if states else None


def read_memory(proc: str) -> tuple[MemoryState | None, int | None]:
    """Return the memory and the bytes that the integrated GPU holds of it (None without NvMapMemUsed)."""
    values = memory.parse(read_text(f"{proc}/meminfo") or "")
    total = values.get("MemTotal")
    if total is None:
        return None, None
    available, _ = memory.mem_available_bytes(values)
    swap = values.get("SwapTotal", 0)
    used = max(0, swap - values.get("SwapFree", 0))
    return MemoryState(total, available, swap, used), values.get("NvMapMemUsed")


# Read power rails of Jetson modules (INA3221 by label, INA238) and choose the total.

# Rails that feed all others of the module (of the carrier too: VIN), best first. The order is that
# of jetson-stats 7.2.2.
TOTAL_RAILS = ("VIN", "VDD_IN", "POM_5V_IN")
SUM = "sum of rails"
SUM_NOTE = "sum of the module's rails; the carrier board is not measured"
# Almost four times the largest module (Thor, 130 W): more is a mistaken unit or a broken sensor.
MAX_W = 500.0
# INA3221: the offset of ±80 µV over a 5 mΩ shunt reads as up to 16 mA below zero on an unloaded rail.
_OFFSET_MA = 50
_SAG_V = 4.75  # 5 V less 5 %, the lower end of the input range of 5 V modules
# Chips whose alarms are of the board's supply: the power monitors of TI (ina219, ina226, ina238, ina3221 …) and the
# Raspberry Pi's. Those of a PC's Super I/O have limits that its firmware rarely sets.
_SUPPLY_CHIPS = ("ina", "rpi_volt")
_ALARMS = ("curr", "in", "power")  # Documentation/hwmon/sysfs-interface: curr1_lcrit_alarm, in0_min_alarm, power1_alarm


class RailNode(Struct, frozen=True):
    """Paths of one rail. Where the chip computes power itself (INA238) `power_uw` is read, else mV × mA."""

    name: str
    millivolt: str
    milliamp: str
    power_uw: str | None = None
    enable: str | None = None

    def read(self) -> Rail | None:
        """Return the rail; None if it cannot be read or reports what no board draws."""
        mv, ma = read_int(self.millivolt), read_int(self.milliamp)
        ma = 0 if ma is not None and -_OFFSET_MA <= ma < 0 else ma
        uw = read_int(self.power_uw) if self.power_uw else None
        if uw is None and (mv is None or ma is None):
            return None
        watts = uw / 1e6 if uw is not None else (mv or 0) * (ma or 0) / 1e6
        # The chips measure in front of the regulators: 0 V is a channel that is not wired, or a sensor that is off.
        if not 0 <= watts <= MAX_W or mv == 0:
            return None
        return Rail(self.name, watts, None if mv is None else mv / 1e3, None if ma is None else ma / 1e3)


def find_rails(sys: str) -> tuple[RailNode, ...]:
    """Find rails under `sys` ("/sys"), by chip name and label: hwmon numbers change between boots."""
    found: list[RailNode] = []
    for hwmon in children(f"{sys}/class/hwmon", "hwmon"):
        chip = read_text(f"{hwmon}/name")
        if chip == "ina3221":
            found += _ina3221(hwmon)
        elif chip == "ina238":
            found.append(RailNode("VIN", f"{hwmon}/in1_input", f"{hwmon}/curr1_input", f"{hwmon}/power1_input"))
    return tuple(found)


def _ina3221(hwmon: str) -> list[RailNode]:
    """Return the connected channels of three. `NC` means not connected; in7 sums shunt voltages and has no current."""
    nodes = []
    for channel in (1, 2, 3):
        label = read_text(f"{hwmon}/in{channel}_label")
        current = f"{hwmon}/curr{channel}_input"
        if label and label != "NC" and Path(current).exists():
            volt = f"{hwmon}/in{channel}"
            nodes.append(RailNode(label, f"{volt}_input", current, enable=f"{volt}_enable"))
    return nodes


def total(rails: Sequence[Rail], alternatives: Sequence[Sequence[str]]) -> PowerState | None:
    """Return the board's total: VIN, VDD_IN or POM_5V_IN, else the first of `alternatives` whose rails are all there.

    A sum that lacks a rail would look like a saving, so there is none then.
    """
    by_name = {rail.name: rail.power_w for rail in rails}
    for names in (*((name,) for name in TOTAL_RAILS), *alternatives):
        if all(name in by_name for name in names):
            if not sum(by_name[name] for name in names):
                return None  # a module that runs this code draws power
            if len(names) == 1:
                return PowerState(by_name[names[0]], names[0], tuple(names))
            return PowerState(sum(by_name[name] for name in names), SUM, tuple(names), SUM_NOTE)
    return None


def missing_power(nodes: Sequence[RailNode], rails: Sequence[Rail], facts: Sensors) -> tuple[str, ...]:
    """Explain why there is no total: rails that are switched off, unreadable or absent."""
    readable = {rail.name for rail in rails}
    by_name = {node.name: node for node in nodes}
    wanted = facts.total[-1] if facts.total else ()
    notes = []
    for name in dict.fromkeys((*wanted, *by_name)):
        if name in readable:
            continue
        node = by_name.get(name)
        if node is None:
            notes.append(f"no total power: rail {name} of this board is not there")
        elif node.enable is not None and read_int(node.enable) == 0:
            notes.append(f"no total power: rail {name} is switched off ({node.enable.rpartition('/')[2]} is 0)")
        else:
            notes.append(f"no total power: rail {name} cannot be read")
    if any(rail.name in (*wanted, *TOTAL_RAILS) and not rail.power_w for rail in rails):
        notes.append("no total power: 0 W is what a sensor reads that measures nothing")
    elif not notes and rails:
        notes.append("no total power: what the rails of this board add up to is not known")
    return tuple(notes)


def find_supply_alarms(sys: str) -> tuple[tuple[str, str], ...]:
    """Return (name, path of its alarm) of the supply's chips, as `VDD_IN curr1_crit_alarm`."""
    return tuple(
        (f"{_channel_label(hwmon, path)} {path.rpartition('/')[2]}", path)
        for hwmon in children(f"{sys}/class/hwmon", "hwmon")
        if (read_text(f"{hwmon}/name") or "").startswith(_SUPPLY_CHIPS)
        for kind in _ALARMS
        for path in children(hwmon, kind)
        if path.endswith("_alarm")
    )


def _channel_label(hwmon: str, path: str) -> str:
    """Return the label of an alarm's channel; without one (rpi_volt, ina238) the chip's name."""
    channel = "".join(filter(str.isdigit, path.rpartition("/")[2].partition("_")[0]))
    return read_text(f"{hwmon}/in{channel}_label") or read_text(f"{hwmon}/name") or ""


def supply_trouble(alarms: Sequence[tuple[str, str]], rails: Sequence[Rail], facts: Sensors) -> tuple[str, ...]:
    """Return what the supply's alarms and the voltage of the 5 V rail report."""
    found = [f"power supply: {name}" for name, path in alarms if (read_int(path) or 0) > 0]
    for rail in rails:
        if rail.name == facts.five_volt and rail.voltage_v is not None and 1.0 < rail.voltage_v < _SAG_V:
            found.append(f"power supply: {rail.name} sags to {rail.voltage_v:.2f} V")
    return tuple(found)


# Find thermal zones with their trip points, throttle alerts and over-current counters in sysfs.

# Trip points outside this range are placeholders of x86 firmware (0 and −274 °C), not limits.
_SANE_TRIP_C = (40.0, 150.0)

# Types of cooling devices that slow something down: `cpu-throttle-alert` (Orin, Thor), `cpufreq-cpu0`, `17000000.gpu`,
# `devfreq-gpu-gpc-0` (Thor), `Processor` (ACPI). A fan (`pwm-fan`, `Fan`) is none.
_THROTTLES = ("throttle", "cpufreq", "devfreq", ".gpu", ".ga10b", ".gv11b", "Processor")


class ZoneNode(Struct, frozen=True):
    """Path and trip points of one thermal zone."""

    name: str
    path: str
    passive_c: float | None
    critical_c: float | None
    limits: bool

    def read(self) -> Zone:
        milli = read_int(self.path)
        temp = None if milli is None else celsius(milli / 1000)
        return Zone(self.name, temp, self.passive_c, self.critical_c, self.limits)


def find_zones(sys: str, limiting: tuple[str, ...]) -> tuple[ZoneNode, ...]:
    """Find zones under `sys`; those whose names begin as one of `limiting` limit requests.

    "cpu-thermal" (JetPack 6), "CPU" and "CPU-therm" (JetPack 5) all become `cpu`.
    """
    nodes: dict[str, ZoneNode] = {}
    for folder in children(f"{sys}/class/thermal", "thermal_zone"):
        kind = read_text(f"{folder}/type")
        if not kind:
            continue
        name = kind.lower().removesuffix("-thermal").removesuffix("-therm")
        while name in nodes:  # two packages of one machine have the same type
            name += "'"
        trips = _trips(folder)
        limits = name.startswith(limiting)
        nodes[name] = ZoneNode(name, f"{folder}/temp", trips.get("passive"), trips.get("critical"), limits)
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
