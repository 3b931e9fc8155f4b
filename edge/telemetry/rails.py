"""Read power rails of Jetson modules (INA3221 by label, INA238) and choose the total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.telemetry.nodes import children, read_int, read_text
from edge.telemetry.sample import Power, Rail

# Rails that feed all others of the module (of the carrier too: VIN), best first. The order is that
# of jetson-stats 7.2.2.
TOTAL_RAILS = ("VIN", "VDD_IN", "POM_5V_IN")
SUM = "sum of rails"
SUM_NOTE = "sum of the module's rails; the carrier board is not measured"
# Almost four times the largest module (Thor, 130 W): more is a mistaken unit or a broken sensor.
MAX_W = 500.0


@dataclass(frozen=True, slots=True)
class RailNode:
    """Paths of one rail. Where the chip computes power itself (INA238) `power_uw` is read, else mV × mA."""

    name: str
    millivolt: str
    milliamp: str
    power_uw: str | None = None

    def read(self) -> Rail | None:
        mv, ma = read_int(self.millivolt), read_int(self.milliamp)
        uw = read_int(self.power_uw) if self.power_uw else None
        if uw is None and (mv is None or ma is None):
            return None
        watts = uw / 1e6 if uw is not None else (mv or 0) * (ma or 0) / 1e6
        if not 0 <= watts <= MAX_W:
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
            nodes.append(RailNode(label, f"{hwmon}/in{channel}_input", current))
    return nodes


def total(rails: Sequence[Rail], expected: int) -> Power | None:
    """Return VIN, VDD_IN or POM_5V_IN where there is one, else the sum, and only of all `expected` rails.

    A sum that lacks one rail would look like a saving.
    """
    by_name = {rail.name: rail for rail in rails}
    for name in TOTAL_RAILS:
        if name in by_name:
            return Power(by_name[name].power_w, name, (name,))
    if not rails or len(rails) < expected:
        return None
    return Power(sum(rail.power_w for rail in rails), SUM, tuple(rail.name for rail in rails), SUM_NOTE)
