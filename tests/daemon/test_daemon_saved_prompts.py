"""Prompts that survive a restart, with the real embedded engine: after a stop, a kill, and with damaged files."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from edge.config.values import Preset
from edge.plan.prepare import system_prompt_of
from edge.supervisor.process import with_slot_folder
from tests.serving import Up, alive, eventually

SENTENCES = " ".join(f"Word number {number} is followed by another." for number in range(60))  # some 610 tokens
LEAST_TOKENS = 512


def up(state: Path, model: Path, *more: str) -> Up:
    settings = ["--set", "saved_prompts=on", "--set", "n_ctx=2048"]
    return Up(state, "-p", "cpu", "-m", f"demo={model}", *settings, *more)


def ask(serving: Up, text: str) -> dict[str, Any]:
    """Return llama-server's timings of one answer: `cache_n` tokens were not computed."""
    answer = serving.chat(text, max_tokens=1, timeout=300)
    assert answer.status_code == 200, answer.text
    timings: dict[str, Any] = answer.json()["timings"]
    return timings


def files(state: Path) -> list[Path]:
    return sorted((state / "cache" / "prompts" / "main").glob("*"))


@pytest.fixture(scope="module")
def served_once(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """The state of an edgellm that computed one long prompt and was stopped."""
    state = tmp_path_factory.mktemp("e")
    with up(state, smollm2) as first:
        first.wait_for("ok")
        assert ask(first, SENTENCES)["prompt_n"] > LEAST_TOKENS
        ask(first, "Hi")  # the next prompt takes the only slot
        assert ask(first, SENTENCES)["cache_n"] > LEAST_TOKENS, "the engine's own prompt cache gives it back"
    return state


def copied(state: Path, to: Path) -> list[Path]:
    """Copy the saved prompts to another state folder."""
    (to / "cache" / "prompts" / "main").mkdir(parents=True, mode=0o700)
    for path in files(state):
        copy = to / path.relative_to(state)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
    return files(to)


def test_a_prompt_is_saved_at_the_stop_and_not_computed_again(served_once: Path, smollm2: Path, tmp_path: Path) -> None:
    (kept,) = copied(served_once, tmp_path)
    assert kept.suffix == ".slot"
    with up(tmp_path, smollm2) as second:
        second.wait_for("ok")
        assert ask(second, SENTENCES)["cache_n"] > LEAST_TOKENS


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda _: b"foreign"],
    ids=["truncated", "one bit", "foreign"],
)
def test_a_damaged_file_is_dropped_and_the_start_is_as_any_other(
    served_once: Path, smollm2: Path, tmp_path: Path, damage: Any
) -> None:
    (kept,) = copied(served_once, tmp_path)
    kept.write_bytes(damage(kept.read_bytes()))
    with up(tmp_path, smollm2) as second:
        second.wait_for("ok")
        assert ask(second, "Hi")["prompt_n"] > 0
        assert not kept.exists()
        assert second.status()["models"]["demo"]["restarts"] == 0


def test_a_file_of_another_context_is_not_given_to_the_engine(served_once: Path, smollm2: Path, tmp_path: Path) -> None:
    copied(served_once, tmp_path)
    with up(tmp_path, smollm2, "--set", "n_ctx=1024", "--set", "n_ctx_min=1024") as second:
        second.wait_for("ok")
        assert ask(second, SENTENCES)["prompt_n"] > LEAST_TOKENS


def test_saved_prompts_survive_a_kill_of_everything(served_once: Path, smollm2: Path, tmp_path: Path) -> None:
    (kept,) = copied(served_once, tmp_path)
    with up(tmp_path, smollm2) as killed:
        killed.wait_for("ok")
        engine = killed.child_pid()
        killed.process.kill()
        killed.process.wait()
    eventually(lambda: not alive(engine), "the engine ends with its supervisor")
    assert kept in files(tmp_path)
    with up(tmp_path, smollm2) as second:
        second.wait_for("ok")
        assert ask(second, SENTENCES)["cache_n"] > LEAST_TOKENS
        os.kill(second.child_pid(), signal.SIGKILL)
        eventually(lambda: second.status()["models"]["demo"]["restarts"] == 1, "the engine is started again")
        second.wait_for("ok")
        assert ask(second, SENTENCES)["cache_n"] > LEAST_TOKENS, "and gets the prompt of before the crash"


def test_the_system_prompt_of_a_file_is_computed_once(smollm2: Path, tmp_path: Path) -> None:
    text = tmp_path / "system.txt"
    text.write_text(SENTENCES)
    config = tmp_path / "config" / "edgellm.toml"
    config.parent.mkdir()
    config.write_text(f'[[model]]\nid = "demo"\nref = "{smollm2}"\nsystem_prompt_file = "{text}"\n')
    settings = ("-p", "cpu", "--set", "saved_prompts=on", "--set", "n_ctx=2048")
    messages = [{"role": "system", "content": SENTENCES}, {"role": "user", "content": "Hi"}]
    with Up(tmp_path, *settings) as first:
        first.wait_for("ok")
        eventually(lambda: [path for path in files(tmp_path) if path.suffix == ".slot"], "saved while idle", 300)
    (pinned,) = files(tmp_path)
    before = pinned.read_bytes()
    with Up(tmp_path, *settings) as second:
        second.wait_for("ok")
        assert second.chat(messages=messages, max_tokens=1).json()["timings"]["cache_n"] > LEAST_TOKENS
    assert pinned.read_bytes() == before


def test_a_system_prompt_file_that_is_gone_costs_only_the_prompt(tmp_path: Path) -> None:
    preset = Preset(system_prompt="You are kind.", system_prompt_file=str(tmp_path / "gone"))
    assert system_prompt_of(preset) == "You are kind."


@pytest.mark.full
def test_a_built_engine_keeps_prompts_and_starts_without_its_folder(
    built_server: Path, smollm2: Path, tmp_path: Path
) -> None:
    """llama-server refuses to start when the folder of --slot-save-path is missing: it is made at each spawn."""
    more = ("--engine", str(built_server))
    with up(tmp_path, smollm2, *more) as first:
        first.wait_for("ok")
        assert ask(first, SENTENCES)["prompt_n"] > LEAST_TOKENS
    with up(tmp_path, smollm2, *more) as second:
        second.wait_for("ok")
        assert ask(second, SENTENCES)["cache_n"] > LEAST_TOKENS
    assert len(files(tmp_path)) == 1, "the same conversation replaced its file"
    shutil.rmtree(tmp_path / "cache")
    with up(tmp_path, smollm2, *more) as third:
        third.wait_for("ok")
        assert ask(third, "Hi")["prompt_n"] > 0
        assert third.status()["models"]["demo"]["restarts"] == 0


def test_a_folder_that_cannot_be_made_costs_only_the_saved_prompts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    argv = ["llama-server", "--slot-save-path", str(tmp_path / "file"), "--jinja"]
    assert with_slot_folder(argv) == ["llama-server", "--jinja"]
    argv[2] = str(tmp_path / "new" / "prompts")
    assert with_slot_folder(argv) == argv and (tmp_path / "new" / "prompts").is_dir()
