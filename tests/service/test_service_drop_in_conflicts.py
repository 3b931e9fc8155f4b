"""FC-76: the running service names a drop-in that hides the GPU, and so does the failure that it causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.daemon.late_start import hidden
from edge.errors import DeviceMissingError, ModelMissingError
from edge.service.drop_ins import drop_in_conflicts
from edge.service.unit import Unit

UNIT = "edgellm.service"
OWN = "etc/systemd/system/edgellm.service.d/override.conf"
HIDES = f"/{OWN}: PrivateDevices=yes hides the GPU's device nodes"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.fixture(params=["jetson", "card"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "jetson":
        write(tmp_path, "sys/firmware/devicetree/base/compatible", "nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0")
    else:
        write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
        write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")
    return tmp_path


def test_fc_76_the_file_and_the_line_are_named(machine: Path) -> None:
    assert drop_in_conflicts(UNIT, machine) == ()
    write(machine, OWN, "[Service]\nPrivateDevices=yes\n")
    write(machine, "etc/systemd/system/other.service.d/x.conf", "[Service]\nPrivateDevices=yes\n")
    write(machine, "etc/systemd/system/edgellm.service.d/10-install.conf", "[Service]\nPrivateDevices=yes\n")
    assert drop_in_conflicts(UNIT, machine) == (HIDES,)


def test_a_file_of_the_same_name_stands_for_that_of_the_vendor(machine: Path) -> None:
    write(machine, f"usr/lib/{OWN.removeprefix('etc/')}", "[Service]\nPrivateDevices=yes\n")
    assert len(drop_in_conflicts(UNIT, machine)) == 1
    write(machine, OWN, "[Service]\nNice=5\n")
    assert drop_in_conflicts(UNIT, machine) == ()


def test_without_a_gpu_in_the_machine_nothing_is_hidden(tmp_path: Path) -> None:
    write(tmp_path, OWN, "[Service]\nPrivateDevices=yes\n")
    assert drop_in_conflicts(UNIT, tmp_path) == ()


def test_the_fault_says_what_to_take_out() -> None:
    missing = DeviceMissingError("the GPU's device node /dev/nvmap is not there", "the driver may be late")
    failure = hidden(missing, Unit(UNIT, warnings=(HIDES,)))
    assert failure.kind == "device_missing"
    assert failure.evidence.splitlines()[-1] == HIDES
    assert "systemctl edit edgellm.service" in failure.hint
    assert hidden(missing, Unit(UNIT)).hint == "the driver may be late"
    assert hidden(missing, None).hint == "the driver may be late"
    other = ModelMissingError("no such file", "pull it")
    assert hidden(other, Unit(UNIT, warnings=(HIDES,))).hint == "pull it"
