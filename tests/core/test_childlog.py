from __future__ import annotations

from pathlib import Path

from edge.childlog import FILE_BYTES, RING_LINES, ChildLog


def test_the_ring_and_two_files_are_bounded(tmp_path: Path) -> None:
    log = ChildLog(tmp_path, "chat")
    line = "x" * 4000
    for _ in range(3 * FILE_BYTES // len(line)):
        log.add(line)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(log.ring) == RING_LINES
    assert [path.name for path in files] == ["chat.log", "chat.log.1"]
    assert all(path.stat().st_size <= FILE_BYTES + 5000 for path in files)


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = ChildLog(tmp_path / "file", "chat")
    log.add("kept in memory")
    log.close()
    assert list(log.ring) == ["kept in memory"]
