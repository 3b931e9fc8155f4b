"""What a model needed to start is kept: the next start of the process has it at once, and a restart tries without."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from edge.daemon.kept_by_model import KeptRemedies
from edge.paths import folders
from tests.daemon.served import Served, served
from tests.fakes.llama_switches import Death

FATAL = Death("loading", [], signal=signal.SIGSEGV, unless="--flash-attn off")


@pytest.fixture
def chat(smollm2: Path) -> str:
    return f'id = "chat"\nref = "{smollm2}"'


def subjects(up: Served) -> list[str]:
    return [item["subject"] for item in up.ready()["degraded"]]


def test_the_next_start_has_the_remedy_at_once(short_dir: Path, chat: str) -> None:
    with served(short_dir, chat, death=FATAL) as up:
        assert subjects(up) == ["flash_attention"]
        first = len(up.pids)
        assert first == 3, "an accident may be once; the second crash costs the first remedy"
    with Served(up.state, "--engine", str(short_dir / "fake/llama-server")) as again:
        again.fake = up.fake
        assert subjects(again) == ["flash_attention"]
        assert len(again.pids) == first + 1
        again.cli("restart")
        assert subjects(again) == ["flash_attention"]
        assert len(again.pids) > first + 2, "a requested restart tries the plan again"


def test_remedies_are_of_one_file_engine_and_rung(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    kept = KeptRemedies(places)
    kept.keep("chat", "f/e/0", [("no-flash-attention", "signal_segv")])
    assert KeptRemedies(places).of("chat", "f/e/0") == (("no-flash-attention", "signal_segv"),)
    assert KeptRemedies(places).of("chat", "f/e2/0") == KeptRemedies(places).of("other", "f/e/0") == ()
    kept.keep("chat", "f/e/0", [])
    assert KeptRemedies(places).of("chat", "f/e/0") == ()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"schema": 1, "models": 3}', '{"schema": 1, "models": {"chat": {"key": "k", "remedies": [1]}}}'],
)
def test_a_damaged_file_has_no_remedies(tmp_path: Path, text: str) -> None:
    places = folders({}, tmp_path)
    path = places.instance_state / "remedies.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert KeptRemedies(places).of("chat", "k") == ()
    many = {"schema": 1, "models": {"chat": {"key": "k", "remedies": [["a", "b"]] * 1000}}}
    path.write_text(json.dumps(many))
    assert len(KeptRemedies(places).of("chat", "k")) < 20
