"""Engines beside llama.cpp: a voice and a recognizer of speech are residents as language models are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.served import Served, config_text, served
from tests.fakes import speech_server
from tests.fakes.fake_jetson.tree import fake_board
from tests.kept import kept
from tests.serving import PATIENCE_S, ROOT, alive, eventually

# PyPI wheels: eSpeak NG with its data, PocketSphinx with its English model. Neither needs another package.
PACKAGES = ("espeakng-loader==0.2.4", "pocketsphinx==5.1.1")
CHAT = 'id = "chat"\nref = "{model}"\nset = {{ n_ctx = 512, n_threads = 1 }}'
SENTENCE = "one two three four five"


@pytest.fixture(scope="session")
def speech(test_cache: Path) -> Path:
    """A folder with both packages, fetched once."""
    folder = test_cache / f"speech-{sys.version_info.major}.{sys.version_info.minor}"

    def make(_: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES]
        subprocess.run(command, check=True, timeout=600)

    return kept(folder, make, stamp="complete")


def other(part: str, speech: Path, more: str = "", *arguments: str, memory: str = "150MiB") -> str:
    """The body of a [[model]] with one of the two engines."""
    route = speech_server.LOADERS[part][0]
    command = [sys.executable, speech_server.__file__, part, "--port", "{port}", *arguments]
    return (
        f'id = "{part}"\ncommand = {json.dumps(command)}\nmemory = "{memory}"\nroutes = ["{route}"]\n'
        f'env = {{ PYTHONPATH = "{speech}" }}\n{more}'
    )


@pytest.fixture(scope="module")
def assistant(smollm2: Path, speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three real engines: the embedded llama.cpp and the two of speech."""
    models = CHAT.format(model=smollm2), other("voice", speech), other("ears", speech)
    state = tmp_path_factory.mktemp("speech") / "s"
    (state / "config").mkdir(parents=True)
    (state / "config" / "edgellm.toml").write_text(config_text(*models))
    with Served(state) as up:
        for name in ("chat", "voice", "ears"):
            up.ready(name)
        yield up


def say(up: Served, text: str = SENTENCE, **more: str) -> httpx.Response:
    return httpx.post(f"{up.url}/v1/audio/speech", json={"input": text, **more}, timeout=60)


def hear(up: Served, sound: bytes, **fields: str) -> httpx.Response:
    files = {"file": ("speech.wav", sound, "audio/wav")}
    return httpx.post(f"{up.url}/v1/audio/transcriptions", files=files, data=fields, timeout=60)


def test_what_the_voice_says_is_understood_and_answered(assistant: Served) -> None:
    spoken = say(assistant)
    assert (spoken.status_code, spoken.headers["content-type"], spoken.content[:4]) == (200, "audio/wav", b"RIFF")
    text = hear(assistant, spoken.content).json()["text"]
    assert SENTENCE in text
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = httpx.post(f"{assistant.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["choices"]


def test_a_request_goes_to_the_named_model_or_by_its_path(assistant: Served) -> None:
    sound = say(assistant, model="voice").content
    # The openai package writes a model name of OpenAI where it needs one.
    for name in ("ears", "whisper-1"):
        assert SENTENCE in hear(assistant, sound, model=name).json()["text"]
    refused = hear(assistant, sound, model="voice")
    assert (refused.status_code, refused.json()["error"]["kind"]) == (404, "no_route")
    assert "/v1/audio/speech" in refused.json()["error"]["hint"]
    named = httpx.post(f"{assistant.url}/upstream/voice/v1/audio/speech", json={"input": "hello"}, timeout=60)
    assert named.content[:4] == b"RIFF"
    chat = {"model": "voice", "messages": [{"role": "user", "content": "Hi"}]}
    wrong = httpx.post(f"{assistant.url}/v1/chat/completions", json=chat, timeout=60)
    assert (wrong.status_code, wrong.json()["error"]["kind"]) == (404, "no_route")


def test_lists_name_it_and_chat_clients_are_not_offered_it(assistant: Served) -> None:
    listed = httpx.get(f"{assistant.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert {each["id"] for each in listed} == {"chat", "voice", "ears"}
    tags = httpx.get(f"{assistant.url}/api/tags", timeout=PATIENCE_S).json()["models"]
    assert [each["name"] for each in tags] == ["chat"]


def test_gates_state_what_is_observed_and_what_is_not(assistant: Served) -> None:
    gates = assistant.model("ears")["gates"]
    assert gates["warm"]["ready"]
    assert "GET /health is answered" in gates["warm"]["evidence"]
    assert not gates["weights"]["ready"]
    assert gates["weights"]["evidence"].startswith("unknown")
    for name in ("driver", "context", "backend", "kv_cache"):
        assert gates[name]["evidence"].startswith("not applicable")
        assert gates[name]["blocked_by"] is None


def test_ps_and_plan_show_its_memory_as_measured(assistant: Served) -> None:
    claim = 150 << 20
    held = json.loads(assistant.cli("ps", "--json"))["models"]["ears"]["memory_bytes"]["host"]
    assert 20 << 20 < held != claim

    def planned() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(assistant.cli("plan", "--json"))["models"]["ears"]
        return found if found["ladder"][0]["memory"]["host"]["claim_bytes"] != claim else None

    plan = eventually(planned, "the next plan has the memory as measured")
    assert plan["model"] is None
    assert plan["other_engine"]["claim_bytes"] == {"host": claim}
    memory = plan["ladder"][0]["memory"]["host"]
    assert 20 << 20 < memory["claim_bytes"] == memory["required_bytes"] != claim
    text = assistant.cli("plan")
    assert "serves /v1/audio/transcriptions" in text
    assert "150.0 MiB were claimed" in text


def test_a_reload_leaves_it_alone_and_its_log_is_shown(assistant: Served) -> None:
    pids = {name: assistant.model(name)["pid"] for name in ("chat", "voice", "ears")}
    assert assistant.reload()["models"] == dict.fromkeys(pids, "kept")
    assert {name: assistant.model(name)["pid"] for name in pids} == pids
    assert "ears serves /v1/audio/transcriptions" in assistant.cli("logs", "--engine")


def test_a_killed_engine_is_started_again_and_others_go_on(assistant: Served) -> None:
    before = assistant.model("voice")["pid"]
    chat = assistant.model("chat")["pid"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: assistant.model("voice")["pid"] not in (before, None), "another engine")
    assert say(assistant).status_code == 200
    assert assistant.model("chat")["pid"] == chat


def test_unload_ends_it_and_a_request_brings_it_back(assistant: Served) -> None:
    pid = assistant.model("voice")["pid"]
    assistant.cli("unload", "voice")
    eventually(lambda: assistant.model("voice")["state"] == "SLEEPING", "voice sleeps")
    assert not alive(pid)
    assert say(assistant).content[:4] == b"RIFF"


def test_it_sleeps_after_its_idle_time_and_a_request_brings_it_back(
    smollm2: Path, speech: Path, tmp_path: Path
) -> None:
    models = CHAT.format(model=smollm2), other("voice", speech, "ttl_s = 1\npreload = false")
    with served(tmp_path, *models, ready=False) as up:
        chat = up.ready("chat")["pid"]
        for _ in range(2):
            assert say(up).content[:4] == b"RIFF"
            eventually(lambda: up.model("voice")["state"] == "SLEEPING", lambda: str(up.status()))
            assert up.model("voice")["pid"] is None
        assert (up.model("chat")["pid"], up.model("chat")["state"]) == (chat, "READY")


@pytest.mark.parametrize(("part", "limit", "then"), [("ears", "200MiB", "SLEEPING"), ("voice", "240MiB", "READY")])
def test_the_measured_memory_decides_who_sleeps(
    part: str, limit: str, then: str, smollm2: Path, speech: Path, tmp_path: Path
) -> None:
    """The demo model's plan takes 178 MiB. The claimed 150 have no room beside it, what a voice takes has."""
    models = CHAT.format(model=smollm2), other(part, speech)
    with served(tmp_path, *models, top=f'[memory]\nlimit = "{limit}"', ready=False) as up:
        up.ready("chat")
        assert up.model(part)["state"] == "SLEEPING"
        up.client.load(part)
        assert up.model("chat")["state"] == "SLEEPING"
        assert up.chat(model="chat").status_code == 200
        assert up.model(part)["state"] == then


def test_a_critical_board_stops_it_and_a_request_waits_until_it_is_cool(
    smollm2: Path, speech: Path, tmp_path: Path
) -> None:
    """As llama-server: it answers what it has, is stopped, starts for no cause, and comes back by itself."""
    models = CHAT.format(model=smollm2), other("voice", speech)
    with fake_board("agx-orin-64") as board, ThreadPoolExecutor(1) as pool:
        board.set_all_temps(50)
        program = [str(ROOT / "tests/fakes/up_on_board.py"), str(board.root), "0.3", "--act"]
        with served(tmp_path, *models, program=program, ready=False) as up:
            up.ready("chat")
            pid = up.ready("voice")["pid"]
            board.set_all_temps(104)

            def hot() -> bool:
                found = up.model("voice")
                return found["state"] == "STOPPED" and found["failure"]["kind"] == "too_hot"

            eventually(hot, lambda: str(up.status()))
            assert not alive(pid)
            restarts = up.model("voice")["restarts"]
            up.cli("restart")
            eventually(lambda: up.model("voice")["restarts"] > restarts and hot(), lambda: str(up.status()))
            headers = {"Edgellm-Max-Wait": "0.3"}
            refused = httpx.post(f"{up.url}/v1/audio/speech", json={"input": "hi"}, headers=headers, timeout=60)
            assert (refused.status_code, int(refused.headers["Retry-After"])) == (503, 30)
            waiting = pool.submit(say, up)
            eventually(lambda: waits(up, "voice"), "the request waits")
            board.set_all_temps(50)
            assert waiting.result().content[:4] == b"RIFF"
            assert up.ready("voice")["pid"] != pid


def waits(up: Served, name: str) -> bool:
    places = httpx.get(f"{up.url}/telemetry", timeout=10, verify=False).json()["gateway"][name]
    return bool(places["queued"] + places["waiting"])


def test_one_that_other_machines_could_reach_is_refused(smollm2: Path, speech: Path, tmp_path: Path) -> None:
    models = CHAT.format(model=smollm2), other("voice", speech, "", "--host", "0.0.0.0")
    with served(tmp_path, *models, ready=False) as up:
        up.ready("chat")
        failed = eventually(lambda: up.model("voice").get("failure"), "a failure")
        assert failed["kind"] == "not_loopback"
        assert "0.0.0.0" in failed["evidence"]
        assert say(up).status_code == 503
