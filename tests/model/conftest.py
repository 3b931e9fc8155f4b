"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge.model.verdict import Verdict, VerdictError


@pytest.fixture
def verdict_of() -> Callable[[Path], Verdict]:
    """Opens a file that must not be a model, and gives the verdict."""
    from edge.model.open import open_model

    def judge(path: Path) -> Verdict:
        with pytest.raises(VerdictError) as caught:
            open_model(path)
        assert path.name in str(caught.value)
        assert caught.value.hint
        return caught.value.verdict

    return judge
