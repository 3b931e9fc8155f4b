"""The real engine killed under load (a short form of tests/bench/supervisor.py), and stopped in mid-answer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.bench.supervisor import CONFIG, killed
from tests.serving import Up, children, eventually

pytestmark = pytest.mark.e2e


def configured(folder: Path, text: str) -> Path:
    """Make a state folder with this edgellm.toml."""
    config = folder / "s" / "config"
    config.mkdir(parents=True)
    (config / "edgellm.toml").write_text(text)
    return folder / "s"


def test_five_kills_under_load_lose_nothing(short_dir: Path, smollm2: Path) -> None:
    state = configured(short_dir, CONFIG)
    with Up(state, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=2048") as up:
        up.wait_for("ok", "degraded")
        seen = killed(up, 5)
    assert seen["unclear"] == [], seen
    assert seen["requests"].get("answered"), seen
    assert (seen["rungs"], seen["orphans"], seen["zombies"]) == ([0], 0, 0), seen
    before, after = seen["descriptors"]
    assert after <= before + 4, seen


def test_fc37_an_engine_that_is_stopped_in_mid_answer_is_replaced(short_dir: Path, smollm2: Path) -> None:
    """SIGSTOP: it neither answers nor ends on SIGTERM; its connections stay open."""
    state = configured(short_dir, "schema = 1\n[restart]\nwedge_s = 2.0\nterm_s = 1.0\n")
    with Up(state, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=2048") as up:
        up.wait_for("ok")
        pid = up.child_pid()
        os.kill(pid, signal.SIGSTOP)
        answer = up.chat(max_tokens=4)
        # Asked again by the gateway: nothing of an answer had come.
        assert answer.status_code == 200
        model = up.status()["models"]["demo"]
        assert model["restarts"] == 1 and model["pid"] != pid
        kinds = [event["kind"] for event in up.events() if event.get("event") == "failed"]
        assert kinds == ["wedged"]


def test_fc26_a_load_that_is_stopped_is_tried_again(short_dir: Path, smollm2: Path) -> None:
    state = configured(short_dir, "schema = 1\n[restart]\nstall_s = 2.0\nterm_s = 1.0\n")
    with Up(state, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=2048") as up:
        (pid,) = eventually(lambda: children(up.process.pid), "an engine")
        os.kill(pid, signal.SIGSTOP)
        up.wait_for("ok")
        kinds = [event["kind"] for event in up.events() if event.get("event") == "failed"]
        assert kinds == ["stalled"] and up.child_pid() != pid
        assert up.chat().status_code == 200


def test_a_long_prompt_is_busy_and_not_dead(short_dir: Path, smollm2: Path) -> None:
    """A long prompt sends nothing for longer than wedge_s and may block /health, and the engine is not killed."""
    state = configured(short_dir, "schema = 1\n[restart]\nwedge_s = 3.0\nterm_s = 1.0\n")
    with Up(state, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=8192") as up:
        up.wait_for("ok")
        began = time.monotonic()
        answer = up.chat("word " * 1500, max_tokens=1, timeout=300)
        assert answer.status_code == 200
        if time.monotonic() - began < 3.5:
            pytest.skip("this machine reads 1500 words within wedge_s: nothing is shown")
        assert up.status()["models"]["demo"]["restarts"] == 0
