from __future__ import annotations

import stat
from pathlib import Path

import pytest

from edge.files import write_atomic


def test_a_file_is_replaced_whole_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, "one")
    write_atomic(path, "two", mode=0o640)
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
