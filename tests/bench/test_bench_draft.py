"""`edgellm bench draft`: which way of drafting wins, and a plan that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.bench.draft import DraftRow, winner
from edge.cli.bench import _draft_lines
from tests.serving import edgellm


def row(way: str, *rounds: float, accepted: int = 40, note: str | None = None) -> DraftRow:
    tokens = 100 * len(rounds)
    seconds = sum(100 / each for each in rounds)
    return DraftRow(way, tokens, seconds, accepted * 2, accepted, {"edit": list(rounds)}, list(rounds), note)


def test_the_fastest_way_wins() -> None:
    rows = [row("off", 20.0, 21.0, accepted=0), row("ngram", 25.0, 26.0), row("mtp", 31.0, 30.0)]
    assert winner(rows) is rows[2]
    assert "fastest" in _draft_lines(rows, rows[2], applied=True)[3]
    assert "speculation = auto uses mtp from now on" in _draft_lines(rows, rows[2], applied=True)[-1]


@pytest.mark.parametrize(
    ("other", "because"),
    [
        (row("ngram", 20.5, 21.5), "within 5 %"),
        (row("ngram", 40.0, 20.9), "behind in one round: another process was busy in the other"),
        (row("ngram", 30.0, 30.0, accepted=0), "no token of a draft was accepted"),
        (row("mtp", 90.0, note="the engine ended while it loaded"), "it broke in the second round"),
        (row("ngram", 10.0, 10.0), "slower"),
    ],
)
def test_without_drafts_wins_where_another_is_not_clearly_ahead(other: DraftRow, because: str) -> None:
    without = row("off", 20.0, 21.0, accepted=0)
    assert winner([without, other]) is without, because


def test_no_measurement_without_drafts_is_no_winner() -> None:
    assert winner([row("off", note="no engine"), row("ngram", 20.0)]) is None


def test_the_real_engine_is_measured_and_the_plan_uses_what_was_kept(short_dir: Path, smollm2: Path) -> None:
    """The choice depends on this machine; what must hold is that `auto` plans it, and that MTP is not made up."""
    common = ["-p", "cpu", "-m", f"chat={smollm2}", "--state-dir", str(short_dir)]
    before = edgellm("plan", *common, "--set", "speculation=auto")
    assert "this model is not measured yet" in before.stdout
    done = edgellm("bench", "draft", *common, "--tokens", "8", "--repeat", "1", "--apply", "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    off, ngram, mtp = found["rows"]
    assert off["tokens"] == ngram["tokens"] == 16 and len(off["rounds"]) == len(ngram["rounds"]) == 1
    assert "no MTP layers" in mtp["note"] and mtp["tokens"] == 0
    assert found["applied"] and found["winner"]["speculation"] in ("off", "ngram")
    after = edgellm("plan", *common, "--set", "speculation=auto")
    assert "not measured" not in after.stdout
    assert ("ngram" in after.stdout) is (found["winner"]["speculation"] == "ngram")
