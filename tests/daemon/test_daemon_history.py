"""The speed baseline of a model that ran as planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.daemon import history
from edge.daemon.history import _known_rate
from edge.daemon.kept_by_model import SpeedBaseline, key
from edge.daemon.remembered_launch import identity
from edge.paths import folders


def test_the_fastest_counts_and_only_for_the_same_file_engine_and_rung(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    this, other = key("f", "e", 0), key("f", "e", 1)
    good = SpeedBaseline(places)
    assert good.tokens_s("chat", this) is None
    for speed in (40.0, 12.0, 41.5, 3.0):  # declining start by start, each within the floor of the one before
        good.keep("chat", this, speed)
    assert SpeedBaseline(places).tokens_s("chat", this) == 41.5
    assert SpeedBaseline(places).tokens_s("chat", other) is None
    good.keep("chat", other, 5.0)
    assert SpeedBaseline(places).tokens_s("chat", other) == 5.0


def test_a_damaged_file_is_no_memory(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    SpeedBaseline(places).keep("chat", "k", 1.0)
    for text in ("", "[]", '{"schema": 9}', '{"schema": 1, "models": {"chat": 3}}', "\0"):
        (places.instance_state / "last_good.json").write_text(text)
        assert SpeedBaseline(places).tokens_s("chat", "k") is None


@pytest.mark.parametrize("kept", [None, [], {}, {"bytes_s": 1}, {"bytes_s": "x", "streams": 1}, {"streams": True}])
def test_a_kept_rate_that_is_none_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: object
) -> None:
    """A null in read_rates.json was an AttributeError at each start."""
    monkeypatch.setattr(history, "measure_read_rate", lambda *_, **__: None)
    model, path = tmp_path / "m.gguf", tmp_path / "read_rates.json"
    model.write_bytes(b"x")
    known = {"identity": identity(str(model))}
    path.write_text(json.dumps({str(model): {**known, **kept} if isinstance(kept, dict) and kept else kept}))
    assert _known_rate(path, str(model)) == (known, True)


def test_a_kept_rate_is_not_measured_again(tmp_path: Path) -> None:
    model, path = tmp_path / "m.gguf", tmp_path / "read_rates.json"
    model.write_bytes(b"x")
    for figures in ({}, {"bytes_s": 3, "streams": 2}):
        known = {"identity": identity(str(model)), **figures}
        path.write_text(json.dumps({str(model): known}))
        assert _known_rate(path, str(model)) == (known, False)
