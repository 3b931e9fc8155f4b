"""Read CPU, memory, swap, disk and package temperature of any machine through psutil."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge.telemetry.sample import MemoryState, Sample, Zone, celsius

_SLOW_S = 10.0  # free space and a package temperature change slowly, and listing all sensors takes milliseconds
# Drivers of package sensors: Intel, AMD, the out-of-tree one for Zen, ARM boards without trip points.
_PACKAGE_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


class HostSource:
    """A sensor source for any machine. `disk` is a folder on the models' file system."""

    name = "host"

    def __init__(self, disk: Path = Path("/")) -> None:
        self.disk = disk
        self._slow_at_s = float("-inf")
        self._disk_free_bytes: int | None = None
        self._zones: tuple[Zone, ...] = ()
        self._primed = False

    def read(self, now: float, *, quick: bool = False) -> Sample:
        """Return one sample. The first has no `cpu_load_ratio`: a load is a difference between two reads."""
        import psutil

        memory, swap = _known(psutil.virtual_memory), _known(psutil.swap_memory)
        state = None
        if memory is not None:
            used = (swap.total, swap.used) if swap is not None else (0, 0)
            state = MemoryState(memory.total, memory.available, *used)
        if quick:
            return Sample(now, self.name, zones=self._zones, memory=state)
        load = _known(psutil.cpu_percent)
        if now - self._slow_at_s >= _SLOW_S:
            self._read_slow(now)
        primed, self._primed = self._primed, True
        return Sample(
            now,
            self.name,
            zones=self._zones,
            memory=state,
            cpu_load_ratio=load / 100 if primed and load is not None else None,
            disk_free_bytes=self._disk_free_bytes,
        )

    def _read_slow(self, now: float) -> None:
        import psutil

        self._slow_at_s = now
        disk = _known(lambda: psutil.disk_usage(str(self.disk)))
        self._disk_free_bytes = None if disk is None else disk.free
        sensors = _known(psutil.sensors_temperatures) or {}
        readings = [celsius(entry.current) for chip in _PACKAGE_CHIPS for entry in sensors.get(chip, ())]
        hottest = max((temp for temp in readings if temp is not None), default=None)
        # Without trip points: coretemp's "critical" is where a CPU throttles itself by design, under any full load.
        self._zones = () if hottest is None else (Zone("package", hottest),)


def _known(read: Callable[[], Any]) -> Any:
    """Return what psutil reads; None where this kernel or container hides or malforms it."""
    try:
        return read()
    except Exception:  # OSError, RuntimeError, KeyError, NotImplementedError …: one value is lost, not all
        return None
