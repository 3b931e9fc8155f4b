"""A minute of random requests for more models than memory holds, on the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.units import MIB
from tests.bench.pool import MODEL_MIB, BusyLeavers, soak


@pytest.mark.full
def test_every_request_is_answered_and_no_memory_is_given_twice(smollm2: Path) -> None:
    seen = soak(smollm2, models=6, fit=2, requests=3, seconds=60, clients=5)
    assert seen.wrong == []
    assert seen.answered >= 18
    assert seen.most <= 2
    assert 0 < seen.most_bytes <= int(2.5 * MODEL_MIB) * MIB


@pytest.mark.parametrize(
    ("looks", "wrong"),
    [
        ([("READY", 1), ("READY", 1), ("DRAINING", 1)], True),
        ([("READY", 1), ("READY", 2), ("STOPPING", 1), ("STOPPING", 1)], True),
        ([("READY", 1), ("READY", 1), ("DRAINING", 0)], False),
        ([("READY", 0), ("READY", 0), ("DRAINING", 1), ("DRAINING", 1)], False),  # it came after the choice
        ([("READY", 0), ("READY", 1), ("DRAINING", 1), ("DRAINING", 1)], False),  # so did this one, perhaps
        ([("READY", 1), ("READY", 0), ("READY", 1), ("DRAINING", 1)], False),
    ],
)
def test_the_soak_finds_a_busy_model_that_was_chosen(looks: list[tuple[str, int]], wrong: bool) -> None:
    def found(apart_s: float) -> list[str]:
        leavers, names = BusyLeavers(idle_s=0.2), []
        for number, (state, open_) in enumerate(looks):
            asked_s = number * apart_s
            names += leavers.look({"m": {"state": state, "open_requests": open_}}, asked_s, asked_s + 0.01)
        return names

    assert found(0.1) == (["m"] if wrong else [])
    assert found(0.2) == [], "a request may have ended, and the model been idle, between two looks"
