"""Read the sensors of a Jetson, or of any Linux machine, from files alone: no process, no root.

Nodes are found by name and type once and read each second. While one is missing they are searched again every
`REPROBE_S`, because devfreq nodes may appear after the start (FC-71).
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.board.board import Board, PowerMode
from edge.board.tables import Sensors, board_reference
from edge.telemetry.sample import GpuState, Sample
from edge.telemetry.sensors import (
    GpuNode,
    RailNode,
    ZoneNode,
    cpu_locked,
    find_fan,
    find_gpu,
    find_overcurrent,
    find_rails,
    find_supply_alarms,
    find_throttle_alerts,
    find_zones,
    missing_power,
    read_emc,
    read_fan,
    read_int,
    read_memory,
    read_power_mode,
    supply_trouble,
    total,
)

REPROBE_S = 30.0  # a search lists all hwmon and thermal folders; a late driver is late by seconds
_SLOW_S = 10.0  # power mode and locked clocks only change when an operator changes them
# A GPU that is busy and yet below its clock in three samples is slowed down by its firmware: one sample may fall into
# the ramp of the clock governor.
_BUSY_RATIO = 0.9
_CLOCK_LOW_RATIO = 0.9
_LOW_CLOCK_SAMPLES = 3


class _Nodes(Struct, frozen=True):
    """Paths of all sensors found."""

    rails: tuple[RailNode, ...]
    supply_alarms: tuple[tuple[str, str], ...]
    zones: tuple[ZoneNode, ...]
    alerts: tuple[tuple[str, str], ...]
    overcurrent: tuple[tuple[str, str], ...]
    gpu: GpuNode | None
    fan: tuple[str | None, str | None]


class _Slow(Struct, frozen=True):
    """Values that are read every `_SLOW_S`."""

    at_s: float = float("-inf")
    power_mode: PowerMode | None = None
    jetson_clocks: bool | None = None


class SysfsSource:
    """A sensor source for Jetson and other boards. `read()` takes about 1 ms of file reads. `root` replaces "/".

    `board` selects what the sensors mean. `since_boot`: over-current events since boot, not since the first read.
    """

    name = "sysfs"

    def __init__(self, root: Path = Path("/"), board: Board | None = None, *, since_boot: bool = False) -> None:
        self.root, self.board, self.since_boot = root, board, since_boot
        self._sys = str(root / "sys")
        self._facts = sensors_of(board)
        self._nodes: _Nodes | None = None
        self._probed_s = float("-inf")
        self._slow = _Slow()
        self._overcurrent_base: dict[str, int] = {}
        self._low_clock = 0

    def read(self, now: float, *, quick: bool = False) -> Sample:
        """Return one sample; with `quick` only power, temperature and memory (10 Hz while a model starts)."""
        nodes = self._probe(now)
        rails = tuple(rail for node in nodes.rails if (rail := node.read()))
        power = total(rails, self._facts.total)
        memory, gpu_used = read_memory(str(self.root / "proc"))
        sample = Sample(
            now,
            self.name,
            power=power,
            rails=rails,
            supply=supply_trouble(nodes.supply_alarms, rails, self._facts),
            notes=() if power else missing_power(nodes.rails, rails, self._facts),
            zones=tuple(node.read() for node in nodes.zones),
            memory=memory,
            gpu_used_bytes=gpu_used,
        )
        return sample if quick else self._complete(sample, nodes)

    def _complete(self, sample: Sample, nodes: _Nodes) -> Sample:
        gpu = nodes.gpu.read() if nodes.gpu else None
        emc_load, emc_clock = read_emc(self._sys)
        slow = self._read_slow(nodes, sample.at_s)
        return replace(
            sample,
            gpus=(gpu,) if gpu else (),
            emc_load_ratio=emc_load,
            emc_clock_hz=emc_clock,
            fan=read_fan(nodes.fan),
            throttled=self._throttled(nodes, gpu),
            overcurrent=self._overcurrent(nodes),
            power_mode=slow.power_mode,
            jetson_clocks=slow.jetson_clocks,
        )

    def _probe(self, now: float) -> _Nodes:
        """Return the known nodes; search again while one that a Jetson has is missing."""
        known = self._nodes
        if known and (now - self._probed_s < REPROBE_S or self._complete_nodes(known)):
            return known
        sys = self._sys
        self._probed_s = now
        self._nodes = _Nodes(
            find_rails(sys),
            find_supply_alarms(sys),
            find_zones(sys, self._facts.zones),
            find_throttle_alerts(sys),
            find_overcurrent(sys),
            find_gpu(sys),
            find_fan(sys),
        )
        return self._nodes

    def _complete_nodes(self, known: _Nodes) -> bool:
        """Return whether no sensor is missing that may still appear: an INA chip probed late, a late GPU."""
        names = {node.name for node in known.rails}
        rails = all(name in names for name in self._facts.total[0]) if self._facts.total else bool(names)
        return rails and bool(known.zones) and known.gpu is not None and known.gpu.load is not None

    def _read_slow(self, nodes: _Nodes, now: float) -> _Slow:
        if now - self._slow.at_s >= _SLOW_S:
            gpu, cpu = nodes.gpu.locked() if nodes.gpu else None, cpu_locked(self._sys)
            # jetson_clocks raises the lowest clock of GPU and CPU to the highest; one alone was set by other means.
            locked = None if nodes.gpu is None else bool(gpu and cpu)
            self._slow = _Slow(now, read_power_mode(str(self.root)), locked)
        return self._slow

    def _overcurrent(self, nodes: _Nodes) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name, path in nodes.overcurrent:
            count = read_int(path)
            if count is not None:
                # The kernel counts from boot: an event of before our start must not raise an alarm now.
                base = 0 if self.since_boot else self._overcurrent_base.setdefault(name, count)
                counts[name] = max(0, count - base)
        return counts

    def _throttled(self, nodes: _Nodes, gpu: GpuState | None) -> tuple[str, ...]:
        reasons = [kind for kind, path in nodes.alerts if (read_int(path) or 0) > 0]
        if gpu and gpu.load_ratio is not None and gpu.clock_hz is not None and gpu.max_clock_hz:
            slow = gpu.load_ratio >= _BUSY_RATIO and gpu.clock_hz < _CLOCK_LOW_RATIO * gpu.max_clock_hz
            self._low_clock = self._low_clock + 1 if slow else 0
            if self._low_clock >= _LOW_CLOCK_SAMPLES:
                reasons.append("gpu-clock-below-max")
        return tuple(reasons)


def sensors_of(board: Board | None) -> Sensors:
    """Return what a board's sensors mean; without a board, or for one that is not listed, nothing is assumed."""
    if board is None or board.id == "x86_64":  # not listed, and the table takes 5 ms to read
        return Sensors()
    return next((row for row in board_reference().sensors if board.id in row.boards), Sensors())
