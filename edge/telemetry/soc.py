"""Read GPU load and clocks, memory controller, fan, power mode and locked clocks of a Jetson from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.board import meminfo, power
from edge.board.board import PowerMode
from edge.telemetry.nodes import children, read_int, read_text
from edge.telemetry.sample import Fan, GpuState, MemoryState

# Device-tree names of integrated GPUs: Xavier, TX2, Orin, Thor; JetPack 6 and later say "gpu".
_GPU_NODES = ("gv11b", "gp10b", "ga10b", "gb10b")


@dataclass(frozen=True, slots=True)
class GpuNode:
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
    return power.active(read_text(f"{root}/var/lib/nvpmodel/status"), read_text(f"{root}/etc/nvpmodel.conf"))


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
    values = meminfo.parse(read_text(f"{proc}/meminfo") or "")
    total = values.get("MemTotal")
    if total is None:
        return None, None
    available, _ = meminfo.available_bytes(values)
    swap = values.get("SwapTotal", 0)
    return MemoryState(total, available, swap, swap - values.get("SwapFree", 0)), values.get("NvMapMemUsed")
