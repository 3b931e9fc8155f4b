from __future__ import annotations

import sys
from pathlib import Path

from edge.daemon.fleet import FILE_BYTES, ChildLog
from edge.linux.best_effort import WAITING_BYTES
from edge.linux.procfs import RING_BYTES, Ring


def test_the_ring_and_two_files_are_bounded(tmp_path: Path) -> None:
    log = ChildLog(tmp_path, "chat")
    line = "x" * 4000
    at_once = WAITING_BYTES // 2 // len(line)
    for _ in range(3 * FILE_BYTES // len(line) // at_once + 1):
        for _ in range(at_once):
            log.add(line)
        assert log._file is not None and log._file.drain(30)
    log.close()
    files = sorted(tmp_path.iterdir())
    kept = sum(map(sys.getsizeof, log.ring.since()))
    assert RING_BYTES - 2 * len(line) < kept <= RING_BYTES
    assert [path.name for path in files] == ["chat.log", "chat.log.1"]
    assert all(path.stat().st_size <= FILE_BYTES for path in files)


def test_the_file_has_no_codes_that_a_terminal_obeys(tmp_path: Path) -> None:
    """A chat template, and so a model, prints into it; `tail -f` shows it as it is."""
    log = ChildLog(tmp_path, "chat")
    log.add("\x1b]52;c;QUJD\x07\u202e\tok")
    log.close()
    assert (tmp_path / "chat.log").read_text() == "\\x1b]52;c;QUJD\\x07\\u202e\tok\n"


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = ChildLog(tmp_path / "file", "chat")
    log.add("kept in memory")
    log.close()
    assert log.ring.since() == ["kept in memory"]


def test_a_ring_tells_what_came_since() -> None:
    ring = Ring(most=3)
    assert ring.since() == []
    for number in range(5):
        ring.add(f"line {number}")
    assert ring.count == 5
    assert ring.since(5) == []
    assert ring.since(4) == ["line 4"]
    assert ring.since(1) == ["line 2", "line 3", "line 4"], "what is gone is not repeated"
    assert ring.since(99) == ["line 2", "line 3", "line 4"], "the other side started again"
