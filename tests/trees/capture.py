"""Copies the files that edgellm reads from this machine into a board tree: `python3 capture.py FOLDER "what it is"`.

Standard library, any Python from 3.8, no root needed. Names, serial numbers and GPU UUIDs do not come along.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILES = (
    *("proc/version", "proc/cpuinfo", "proc/meminfo", "proc/swaps", "proc/sys/vm/swappiness", "proc/vmstat"),
    *("proc/driver/nvidia/version", "proc/driver/nvidia/gpus/*/information"),
    *("etc/nv_tegra_release", "etc/nvpmodel.conf", "var/lib/nvpmodel/status"),
    *("sys/firmware/devicetree/base/model", "sys/firmware/devicetree/base/compatible"),
    *("sys/devices/system/cpu/online", "sys/devices/system/cpu/cpu*/topology/core_cpus_list"),
    *("sys/class/thermal/thermal_zone*/type", "sys/class/thermal/thermal_zone*/temp"),
    *("sys/class/thermal/thermal_zone*/trip_point_*_type", "sys/class/thermal/thermal_zone*/trip_point_*_temp"),
    *("sys/class/thermal/cooling_device*/type", "sys/class/thermal/cooling_device*/cur_state"),
    *("sys/class/hwmon/hwmon*/name", "sys/class/hwmon/hwmon*/*_input", "sys/class/hwmon/hwmon*/*_label"),
    *("sys/class/hwmon/hwmon*/pwm1", "sys/class/hwmon/hwmon*/rpm", "sys/class/hwmon/hwmon*/oc*_event_cnt"),
    *("sys/class/devfreq/*/cur_freq", "sys/class/devfreq/*/min_freq", "sys/class/devfreq/*/max_freq"),
    *("sys/class/devfreq/*/governor", "sys/class/devfreq/*/device/of_node/name", "sys/kernel/nvpmodel_clk_cap/emc"),
    *("sys/class/block/*/dev", "sys/class/block/*/queue/rotational", "sys/class/block/*/partition"),
    *("sys/class/block/mmcblk*/device/type", "sys/devices/virtual/dmi/id/product_name"),
)
NODES = (
    *("dev/nvmap", "dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "dev/nvhost-as-gpu", "dev/nvgpu/igpu0/ctrl"),
    *("dev/host1x-fence", "dev/dri/renderD*", "dev/nvidia[0-9]", "dev/nvidiactl", "dev/nvidia-uvm", "dev/dxg"),
    *(".dockerenv",),
)
SMI = "index,uuid,name,pci.bus_id,memory.total,memory.free,compute_cap,mig.mode.current,persistence_mode,driver_version"
ROOT = Path("/")


def clean(text: str) -> str:
    for number, uuid in enumerate(sorted(set(re.findall(r"(?:GPU|MIG)-[0-9a-f-]{36}", text)))):
        text = text.replace(uuid, f"{uuid[:3]}-00000000-0000-0000-0000-{number:012d}")
    return re.sub(r"\([^ )]+@[^)]*\)", "(build@host)", text)


def put(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(errors="surrogateescape"))


def read(path: Path) -> str:
    """A sensor that refuses to be read becomes an empty file."""
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
    except OSError:
        return ""
    if path.name == "vmstat":
        text = "".join(line for line in text.splitlines(True) if line.startswith("oom_kill "))
    return clean(text)


def main(folder: Path, what: str) -> None:
    for pattern in FILES:
        for path in sorted(ROOT.glob(pattern)):
            if not re.search(r"block/(loop|ram)", str(path)):
                put(folder, str(path).lstrip("/"), read(path))
    for pattern in NODES:
        for path in ROOT.glob(pattern):
            put(folder, str(path).lstrip("/"), "")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines(True)
    put(folder, "proc/self/mountinfo", "".join(line for line in mounts if line.split()[4] == "/"))
    try:
        command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,nounits"]
        put(folder, "nvidia-smi.csv", clean(subprocess.check_output(command, timeout=30).decode()))
    except (OSError, subprocess.SubprocessError):
        pass
    put(folder, "PROVENANCE", f"{what}\nmeasured: every file, by capture.py on that machine\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
