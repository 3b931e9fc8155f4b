"""A folder that looks like a Jetson's /sys, /proc and /etc, with setters that change what its sensors say.

Links are relative, so the same tree is read through a root prefix and, laid over /sys and /proc in a mount namespace,
by the real jtop service (service.py).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.fake_jetson.files import link, put

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
BOARDS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "boards.toml").read_text())
JTOP_GID = 993
_I2C = "devices/platform/bus@0/c240000.i2c/i2c-1"
_NVMAP = "kernel/debug/nvmap/iovmm/maps"


@contextmanager
def fake_board(name: str = "agx-orin-64") -> Iterator[FakeBoard]:
    """In memory where there is such a folder: a board is hundreds of small files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fake-jetson-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield FakeBoard(Path(folder), name)


class FakeBoard:
    """Every value can be set while something reads it."""

    def __init__(self, root: Path, board: str = "agx-orin-64") -> None:
        self.name, self.root, self.spec = board, root, BOARDS[board]
        self.sys, self.proc = root / "sys", root / "proc"
        self._rails: dict[str, tuple[Path, int]] = {}
        self._zones: dict[str, Path] = {}
        self._gpu_processes: dict[int, tuple[str, int]] = {}
        self._vin: Path | None = None
        self._device_tree()
        self._cpu()
        self._gpu()
        self._power()
        self._thermal()
        self._memory()
        self._fan()
        self._etc()
        self._programs()

    # -- what tests set ------------------------------------------------------------------------------------------------

    def set_temp(self, zone: str, celsius: float | None) -> None:
        """None: the sensor is off (an empty file; a board answers EAGAIN, see `gate`)."""
        put(self._zones[zone], b"" if celsius is None else int(celsius * 1000))

    def set_all_temps(self, celsius: float) -> None:
        for zone in self._zones:
            if not zone.startswith("cv"):
                self.set_temp(zone, celsius)

    def gate(self, zone: str) -> int:
        """Reads of the zone really fail with EAGAIN: a FIFO with a writer and no data. Close the result afterwards."""
        path = self._zones[zone]
        path.unlink()
        os.mkfifo(path)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def set_rail(self, rail: str, watts: float) -> None:
        hwmon, channel = self._rails[rail]
        millivolt = int((hwmon / f"in{channel}_input").read_text())
        put(hwmon / f"curr{channel}_input", round(watts * 1e6 / millivolt))

    def set_total_power(self, watts: float) -> None:
        """Spread so that the board's total (VIN, VDD_IN or the sum of rails) is `watts`."""
        for rail, part in self.spec["spread"].items():
            if rail == "VIN" and self._vin:
                put(self._vin / "curr1_input", round(watts * 1e6 / self.spec["ina238"][0]))
                put(self._vin / "power1_input", round(watts * 1e6))
            else:
                self.set_rail(rail, watts * part)

    def set_gpu(self, load: float | None = None, mhz: float | None = None) -> None:
        """`load` in percent; Thor has no file for it."""
        if load is not None and (self._gpu_device / "load").exists():
            put(self._gpu_device / "load", int(load * 10))
        if mhz is not None:
            put(self._devfreq / "cur_freq", int(mhz * 1e6))

    def remove_gpu(self) -> None:
        """The devfreq node is not there (yet), as early in a boot."""
        (self.sys / "class/devfreq" / self.spec["gpu"]).unlink()

    def add_gpu(self) -> None:
        link(self.sys / "class/devfreq" / self.spec["gpu"], self._devfreq)

    def set_memory(self, used_kb: int, cached_kb: int, gpu_kb: int | None = None) -> None:
        total, buffers = self.spec["mem_kb"], 100_000
        free = total - used_kb - cached_kb - buffers
        rows = {"MemTotal": total, "MemFree": free, "MemAvailable": free + cached_kb, "Buffers": buffers}
        rows |= {"Cached": cached_kb, "SwapCached": 0, "SReclaimable": 0, "Shmem": 0, "SwapTotal": 0, "SwapFree": 0}
        if gpu_kb is not None:
            rows |= {"NvMapMemFree": 0, "NvMapMemUsed": gpu_kb}
        rows |= {"CmaTotal": 262144, "CmaFree": 200000}
        self._own_proc("meminfo", "".join(f"{key + ':':<16}{value:>8} kB\n" for key, value in rows.items()))

    def set_overcurrent(self, line: int, count: int) -> None:
        put(self.sys / f"devices/platform/bus@0/soctherm-oc-event/hwmon/hwmon2/oc{line}_event_cnt", count)

    def set_cooling(self, kind: str, state: int) -> None:
        for device in (self.sys / "devices/virtual/thermal").glob("cooling_device*"):
            if (device / "type").read_text().strip() == kind:
                put(device / "cur_state", state)

    def set_emc_percent(self, percent: float) -> None:
        khz = int((self.sys / "kernel/debug/bpmp/debug/clk/emc/rate").read_text()) // 1000
        put(self.sys / "kernel/debug/cactmon/mc_all", int(percent * khz))

    def set_power_mode(self, number: int) -> None:
        put(self.root / "var/lib/nvpmodel/status", f"pmode:{number:04d} fmode:quiet")

    def set_gpu_process(self, pid: int, name: str, kb: int) -> None:
        self._gpu_processes[pid] = (name, kb)
        link(self.proc / str(pid), f"{self.root}/realproc/{pid}")
        self._nvmap()

    def cpu_tick(self, busy_percent: float, ticks: int = 100) -> None:
        busy = int(ticks * busy_percent / 100)
        for core in self._stat:
            core[0] += busy
            core[3] += ticks - busy
        self._write_stat()

    # -- how it is built -----------------------------------------------------------------------------------------------

    def _own_proc(self, name: str, text: str) -> None:
        path = self.proc / name
        if path.is_symlink():
            path.unlink()
        put(path, text.encode())

    def _device_tree(self) -> None:
        base = self.sys / "firmware/devicetree/base"
        put(base / "model", self.spec["model"].encode() + b"\0")
        put(base / "compatible", b"".join(name.encode() + b"\0" for name in self.spec["compatible"]))
        put(base / "serial-number", self.spec["serial"].encode() + b"\0")
        self.proc.mkdir(parents=True, exist_ok=True)
        # What the board does not replace stays reachable (enter.sh mounts the real /proc there); pids when asked for.
        (self.root / "realproc").mkdir(exist_ok=True)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                link(self.proc / entry.name, f"{self.root}/realproc/{entry.name}")
        link(self.proc / "device-tree", base)
        put(self.root / "eeprom.json", json.dumps({"bus": 0, "part": self.spec["part"]}))

    def _cpu(self) -> None:
        count, khz, base = self.spec["cpus"], self.spec["cpu_khz"], self.sys / "devices/system/cpu"
        for name in ("online", "possible", "present"):
            put(base / name, f"0-{count - 1}")
        for number in range(count):
            core = base / f"cpu{number}"
            if number:
                put(core / "online", 1)
            for kind in ("scaling", "cpuinfo"):
                put(core / f"cpufreq/{kind}_min_freq", khz["min"])
                put(core / f"cpufreq/{kind}_max_freq", khz["max"])
                put(core / f"cpufreq/{kind}_cur_freq", khz["now"])
            put(core / "cpufreq/scaling_governor", "schedutil")
            for state, label in enumerate(("WFI", "c7")):
                put(core / f"cpuidle/state{state}/name", label)
                put(core / f"cpuidle/state{state}/disable", 0)
        self._stat = [[1000, 0, 500, 90000, 10, 0, 5, 0, 0, 0] for _ in range(count)]
        self._write_stat()
        features = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
        core_text = f"model name\t: ARMv8 Processor rev 1 (v8l)\nBogoMIPS\t: 62.50\nFeatures\t: {features}\n"
        core_text += (
            "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd42\nCPU revision\t: 1"
        )
        self._own_proc("cpuinfo", "\n\n".join(f"processor\t: {n}\n{core_text}" for n in range(count)) + "\n")

    def _write_stat(self) -> None:
        total = [sum(column) for column in zip(*self._stat, strict=True)]
        lines = ["cpu  " + " ".join(map(str, total))]
        lines += [f"cpu{n} " + " ".join(map(str, core)) for n, core in enumerate(self._stat)]
        lines += ["intr 1", "ctxt 1", "btime 1674644431", "processes 1", "procs_running 1", "procs_blocked 0"]
        self._own_proc("stat", "\n".join(lines) + "\n")

    def _gpu(self) -> None:
        name, hz = self.spec["gpu"], self.spec["gpu_hz"]
        self._gpu_device = self.sys / "devices/platform/bus@0" / name
        self._devfreq = self._gpu_device / "devfreq" / name
        if name != "gpu-gpc-0":  # Thor's driver has no load file
            put(self._gpu_device / "load", 0)
        for node, value in {
            "railgate_enable": 1,
            "enable_3d_scaling": 1,
            "tpc_pg_mask": 0,
            "power/control": "auto",
        }.items():
            put(self._gpu_device / node, value)
        put(self._devfreq / "min_freq", hz["min"])
        put(self._devfreq / "max_freq", hz["max"])
        put(self._devfreq / "cur_freq", hz["now"])
        put(self._devfreq / "governor", "nvhost_podgov")
        put(self._devfreq / "available_governors", "nvhost_podgov performance")
        of_node = self.sys / "firmware/devicetree/base/bus@0" / name
        put(of_node / "name", self.spec["of_name"].encode() + b"\0")
        link(self._gpu_device / "of_node", of_node)
        link(self._devfreq / "device", self._gpu_device)
        self.add_gpu()

    def _power(self) -> None:
        number = 3
        for address, labels in self.spec["ina3221"].items():
            device = self.sys / _I2C / address
            hwmon = device / f"hwmon/hwmon{number}"
            put(device / "name", "ina3221")
            put(hwmon / "name", "ina3221")
            for channel, label in enumerate(labels, 1):
                self._channel(hwmon, channel, label)
            put(hwmon / "in7_label", "sum of shunt voltages")
            put(hwmon / "in7_input", 0)
            link(self.sys / "bus/i2c/devices" / address, device)
            link(self.sys / f"class/hwmon/hwmon{number}", hwmon)
            number += 1
        if "ina238" in self.spec:
            millivolt, milliamp = self.spec["ina238"]
            device = self.sys / _I2C / "1-0044"
            self._vin = device / f"hwmon/hwmon{number}"
            put(device / "name", "ina238")
            values = {
                "name": "ina238",
                "in1_input": millivolt,
                "curr1_input": milliamp,
                "power1_input": millivolt * milliamp,
            }
            for node, value in values.items():
                put(self._vin / node, value)
            link(self.sys / "bus/i2c/devices/1-0044", device)
            link(self.sys / f"class/hwmon/hwmon{number}", self._vin)
        events = self.sys / "devices/platform/bus@0/soctherm-oc-event/hwmon/hwmon2"
        put(events / "name", "soctherm_oc")
        for line in (1, 2, 3):
            put(events / f"oc{line}_event_cnt", 0)
            put(events / f"oc{line}_throt_en", 1)
        link(self.sys / "class/hwmon/hwmon2", events)

    def _channel(self, hwmon: Path, channel: int, label: str) -> None:
        millivolt, milliamp = self.spec["rails"].get(label, (0, 0))
        nodes = {"in%d_label": label, "in%d_enable": 1, "in%d_input": millivolt, "curr%d_input": milliamp}
        nodes |= {"curr%d_max": 32760, "curr%d_crit": 32760, "curr%d_max_alarm": 0, "curr%d_crit_alarm": 0}
        for node, value in nodes.items():
            put(hwmon / (node % channel), value)
        if label != "NC":
            self._rails[label] = (hwmon, channel)

    def _thermal(self) -> None:
        base, by_class = self.sys / "devices/virtual/thermal", self.sys / "class/thermal"
        for number, kind in enumerate(self.spec["zones"]):
            zone = base / f"thermal_zone{number}"
            name = kind.split("-")[0]
            # The rails of cv0-cv2 are off while their accelerators are unused.
            values = {"type": kind, "temp": b"" if name.startswith("cv") else 45000, "mode": "enabled"}
            for trip, (label, milli) in enumerate(zip(("passive", "hot", "critical"), self.spec["trips"], strict=True)):
                values |= {f"trip_point_{trip}_type": label, f"trip_point_{trip}_temp": milli}
            for node, value in values.items():
                put(zone / node, value)
            self._zones[name] = zone / "temp"
            link(by_class / zone.name, zone)
        cooling = {"pwm-fan": 10, "cpufreq-cpu0": 29, "17000000.gpu": 11} | dict.fromkeys(self.spec["alerts"], 2)
        for number, (kind, most) in enumerate(cooling.items()):
            device = base / f"cooling_device{number}"
            put(device / "type", kind)
            put(device / "cur_state", 0)
            put(device / "max_state", most)
            link(by_class / device.name, device)

    def _memory(self) -> None:
        self.set_memory(used_kb=4_000_000, cached_kb=2_000_000, gpu_kb=200_000)
        small = "Node 0, zone      DMA  1 1 1 1 1 1 1 1 1 1 300\n"
        self._own_proc("buddyinfo", small + "Node 0, zone   Normal  10 10 10 10 10 10 10 10 10 10 9000\n")
        self._own_proc("swaps", "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")
        emc, hz = self.sys / "kernel/debug/bpmp/debug/clk/emc", self.spec["emc_hz"]
        put(emc / "rate", hz["now"])
        put(emc / "max_rate", hz["max"])
        put(emc / "min_rate", hz["min"])
        put(emc / "mrq_rate_locked", 0)
        put(self.sys / "kernel/nvpmodel_clk_cap/emc", 0)
        self.set_emc_percent(1)
        for clock, rate in {"ape": 150000000, "nvdec": 0, "nvenc": 0, "vic": 0}.items():
            put(self.sys / f"kernel/debug/clk/{clock}/clk_rate", rate)
            put(self.sys / f"kernel/debug/clk/{clock}/clk_enable_count", int(rate > 0))
        self._nvmap()

    def _nvmap(self) -> None:
        rows = [
            f"user                       {name}     {pid}      {kb}K" for pid, (name, kb) in self._gpu_processes.items()
        ]
        total = sum(kb for _, kb in self._gpu_processes.values())
        head = "CLIENT                        PROCESS      PID        SIZE"
        put(self.sys / _NVMAP, "\n".join([head, *rows, f"total                                              {total}K"]))

    def _fan(self) -> None:
        fan = self.sys / "devices/platform/pwm-fan/hwmon/hwmon1"
        put(fan / "name", "pwmfan")
        put(fan / "pwm1", 66)
        tachometer = self.sys / "devices/platform/bus@0/39c0000.tachometer/hwmon/hwmon0"
        put(tachometer / "name", "pwm_tach")
        put(tachometer / "rpm", 1500)
        link(self.sys / "class/hwmon/hwmon1", fan)
        link(self.sys / "class/hwmon/hwmon0", tachometer)
        for number, (chip, labels) in enumerate(self.spec.get("hwmon_temp", {}).items(), 7):
            hwmon = self.sys / f"devices/platform/bus@0/tmp/hwmon/hwmon{number}"
            put(hwmon / "name", chip)
            for channel, label in enumerate(labels, 1):
                values = {"label": label, "input": 38000, "max": 105000, "crit": 107000}
                for node, value in values.items():
                    put(hwmon / f"temp{channel}_{node}", value)
            link(self.sys / f"class/hwmon/hwmon{number}", hwmon)
        (self.sys / "class/power_supply").mkdir(parents=True, exist_ok=True)

    def _etc(self) -> None:
        etc, modes = self.root / "etc", self.spec["modes"]
        put(etc / "nv_tegra_release", self.spec["release"])
        group = Path("/etc/group").read_text()
        put(etc / "group", (group if "\njtop:" in group else f"{group}jtop:x:{JTOP_GID}:\n").encode())
        put(etc / "systemd/system/nvfancontrol.service", "[Unit]\nDescription=fake")
        put(etc / "nvfancontrol.conf", (HERE / "nvfancontrol.conf").read_bytes())
        put(etc / "nvpmodel.conf", "\n".join(f"< POWER_MODEL ID={n} NAME={name} >" for n, name in enumerate(modes)))
        self.set_power_mode(self.spec["mode"])

    def _programs(self) -> None:
        for source in (HERE / "bin").iterdir():
            text = source.read_text().replace("@ROOT@", str(self.root))
            text = text.replace("@DEFAULT@", str(self.spec["mode"])).replace("@GPU@", self.spec["gpu"])
            put(self.root / "bin" / source.name, text.encode())
            (self.root / "bin" / source.name).chmod(0o755)
