"""A kernel of its own, and a real power cut: what nspawn cannot do. `python -m tests.boot.vm` does it for arm64."""

from __future__ import annotations

import json

import pytest

from tests.boot import vm
from tests.boot.conftest import VM
from tests.boot.vmimage import MACHINES, missing

pytestmark = [pytest.mark.full, pytest.mark.skipif(not VM, reason="minutes: `make boot-test` has it (BOOT_SUITES=vm)")]


def test_after_a_power_cut_and_with_a_clock_in_1970_it_answers_again(
    can_boot: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """A board without a battery: the models are whole, no connection is refused, and the date does not matter."""
    machine = MACHINES["x86_64"]
    lacking = missing(machine)
    assert not lacking, f"needs: apt-get install {' '.join(lacking)}"
    records = vm.boots(machine)
    with capfd.disabled():
        for record in records:
            print(f"\nemulated {json.dumps(record)}")
