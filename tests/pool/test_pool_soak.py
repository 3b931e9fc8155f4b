"""A minute of random requests for more models than memory holds, on the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.units import MIB
from tests.bench.pool import MODEL_MIB, soak


@pytest.mark.full
def test_every_request_is_answered_and_no_memory_is_given_twice(smollm2: Path) -> None:
    seen = soak(smollm2, models=6, fit=2, requests=3, seconds=60, clients=5)
    assert seen.wrong == []
    assert seen.answered >= 18
    assert seen.most <= 2
    assert 0 < seen.most_bytes <= int(2.5 * MODEL_MIB) * MIB
