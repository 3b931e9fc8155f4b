from __future__ import annotations

from pathlib import Path

import pytest

from edge.folders import Folders, folders


@pytest.fixture
def places(tmp_path: Path) -> Folders:
    """The five folders of an edgellm of this test."""
    return folders({}, tmp_path / "state")
