"""A kernel of its own, and a real power cut: what nspawn cannot do. `python -m tests.boot.vm` does it for arm64."""

from __future__ import annotations

import json
import os

import pytest

from tests.boot import vm
from tests.boot.vmimage import MACHINES, missing

pytestmark = pytest.mark.full


def test_after_a_power_cut_and_with_a_clock_in_1970_it_answers_again(
    can_boot: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """A board without a battery: the models are whole, nobody is refused, and the date does not matter."""
    machine = MACHINES["x86_64"]
    lacking = missing(machine)
    if lacking and os.environ.get("CI"):
        pytest.fail(f"no virtual machine here: {', '.join(lacking)} not installed")
    if lacking:
        pytest.skip(f"no virtual machine here: {', '.join(lacking)} not installed")
    records = vm.boots(machine)
    with capfd.disabled():
        for record in records:
            print(f"\nemulated {json.dumps(record)}")
