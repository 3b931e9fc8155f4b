from __future__ import annotations

import os
from pathlib import Path

from edge.coldstart.residency import WINDOW_BYTES, WINDOWS, resident_ratio


def test_what_was_just_written_is_in_memory_and_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(os.urandom(2 * WINDOW_BYTES + 12345))
    assert resident_ratio(path) == 1.0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = resident_ratio(path)
    assert dropped is not None and dropped <= 1.0, "tmpfs keeps its pages, a disk does not"


def test_a_huge_sparse_file_costs_no_more_than_its_windows(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with path.open("wb") as file:
        file.truncate(40 << 30)
    assert resident_ratio(path) == 0.0
    assert WINDOWS * WINDOW_BYTES == 64 << 20


def test_what_cannot_be_told_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_ratio(tmp_path / "empty") is None
    assert resident_ratio(tmp_path / "none") is None
    assert resident_ratio(tmp_path) is None
