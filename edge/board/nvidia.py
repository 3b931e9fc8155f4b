"""Read discrete NVIDIA GPUs through the cheapest way that answers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from edge.board.board import Gpu, GpuReading, Reading, mig_notes
from edge.linux.tree import Tree, parse_count
from edge.units import MIB

# Output of nvidia-smi with --format=csv,nounits, kept in a copied tree.
RECORDED = "/nvidia-smi.csv"
_CAPABILITY = re.compile(r"\d{1,2}\.\d{1,2}")
# Without any of these no driver is loaded, and loading the library would only cost time.
_DRIVER_NODES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


def _silent(_: str) -> None:
    """Report nothing."""


# Gets one sentence when the driver has not answered for a second. The command line and `up` set it.
on_wait: Callable[[str], None] = _silent


def read(tree: Tree) -> Reading:
    """Read NVML here, or the recorded answer in a copied tree, else /proc. Empty without a driver."""
    if not tree.live:
        recorded = tree.text(RECORDED)
        return from_csv(recorded) if recorded else from_proc(tree)
    if not any(tree.exists(node) for node in _DRIVER_NODES):
        return Reading()
    from edge.board import nvml  # late: it imports ctypes, which machines without a driver do not need

    try:
        return nvml.read(on_wait=on_wait) or from_proc(tree)
    except TimeoutError as error:
        return Reading(driver=driver_version(tree), notes=(str(error),))


def hangs() -> str | None:
    """Describe a driver that has not answered in time and still does not; None otherwise."""
    nvml = sys.modules.get("edge.board.nvml")
    return str(nvml.HANGS) if nvml is not None and nvml.hangs() else None


def from_csv(text: str) -> Reading:
    """Parse nvidia-smi's columns: index, uuid, name, pci.bus_id, memory.total [MiB], compute_cap, …"""
    import csv

    rows = [
        {(key or "").split(" [")[0]: value or "" for key, value in row.items() if isinstance(value, str)}
        for row in csv.DictReader(text.splitlines(), skipinitialspace=True)
    ]
    gpus = tuple(_from_row(row) for row in rows)
    driver = next((_known(row.get("driver_version")) for row in rows), None)
    return Reading(gpus, driver, source="recorded", notes=mig_notes(gpus))


def _from_row(row: dict[str, str]) -> GpuReading:
    index, total, free = (_known(row.get(name)) for name in ("index", "memory.total", "memory.free"))
    capability = row.get("compute_cap", "").strip()
    gpu = Gpu(
        name=_known(row.get("name")) or "NVIDIA GPU",
        uuid=_known(row.get("uuid")),
        index=parse_count(index or ""),
        pci_bus_id=_known(row.get("pci.bus_id")),
        memory_bytes=_mib(total),
        compute_capability=capability if _CAPABILITY.fullmatch(capability) else None,
        mig=row.get("mig.mode.current", "").strip() == "Enabled",
    )
    persistence = _known(row.get("persistence_mode"))
    return GpuReading(gpu, _mib(free), persistence == "Enabled" if persistence else None)


def _mib(text: str | None) -> int | None:
    count = parse_count(text or "")
    return None if count is None else count * MIB


def _known(value: str | None) -> str | None:
    """Return the cell; None for nvidia-smi's [N/A] and [Not Supported]."""
    text = (value or "").strip()
    return text if text and not text.startswith("[") else None


def from_proc(tree: Tree) -> Reading:
    """Read names, UUIDs and bus ids from /proc/driver/nvidia, which has no memory and no compute capability."""
    base = "/proc/driver/nvidia/gpus"
    gpus = []
    for index, bus in enumerate(tree.children(base)):
        pairs = (line.partition(":") for line in tree.lines(f"{base}/{bus}/information"))
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        name, uuid = fields.get("Model", "NVIDIA GPU"), fields.get("GPU UUID")
        gpus.append(GpuReading(Gpu(name, uuid, index, fields.get("Bus Location", bus))))
    notes = ("the driver's management library does not answer: GPU memory is unknown",) if gpus else ()
    return Reading(tuple(gpus), driver_version(tree), source="proc" if gpus else None, notes=notes)


def driver_version(tree: Tree) -> str | None:
    """Read `570.133.07` from /proc/driver/nvidia/version."""
    words = (tree.text("/proc/driver/nvidia/version") or "").partition("\n")[0].split()
    return next((word for word in words if word[0].isdecimal() and "." in word), None)
