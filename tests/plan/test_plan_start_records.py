from __future__ import annotations

import json
from pathlib import Path

from edge.plan.start_records import KEPT_LINES, append, read


def test_the_last_fifty_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "main" / "starts.jsonl"
    for number in range(KEPT_LINES + 5):
        assert append(path, {"n": number})
    assert [record["n"] for record in read(path)] == list(range(5, KEPT_LINES + 5))


def test_a_torn_line_is_left_out_and_healed(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    path.write_text(json.dumps({"n": 1}) + '\n{"n": 2\n[3]\n\x00\x00\n')
    assert read(path) == [{"n": 1}]
    append(path, {"n": 4})
    assert len(path.read_text().splitlines()) == 2


def test_a_disk_that_cannot_be_written_is_only_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not append(tmp_path / "file" / "starts.jsonl", {})
    assert read(tmp_path / "none") == []
