"""Models that wait for their turn while something else happens: every waiter is answered, and the others go on."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.daemon.served import Served, config_text, served
from tests.pool.test_pool_up import LIMIT, ask, entry, requests_open
from tests.serving import eventually, stopped


@contextmanager
def waiting(up: Served, *names: str) -> Iterator[list[Future[httpx.Response]]]:
    """Let a compute one request and the named models wait for its memory; leaving it lets the engine of a go on."""
    with ThreadPoolExecutor(1 + len(names)) as pool:
        with stopped(up.model("a")["pid"]):
            asked = []
            for number, name in enumerate(("a", *names), start=1):
                asked.append(pool.submit(ask, up, name))
                eventually(lambda number=number: requests_open(up) == number, lambda: str(up.status()))
            yield asked
        for each in asked:
            each.result()


@pytest.mark.e2e
def test_a_model_whose_file_vanishes_while_it_waits(smollm2: Path, short_dir: Path) -> None:
    """On the real engine. Its requests get the failure, and the model that made room is served again."""
    file = short_dir / smollm2.name
    shutil.copy(smollm2, file)
    state = short_dir / "s"
    (state / "config").mkdir(parents=True)
    settings = 'set = { saved_prompts = "off", n_ctx = 512, n_threads = 1, cache_ram = 0 }'
    models = [f'id = "{name}"\nref = "{ref}"\n{settings}' for name, ref in (("a", smollm2), ("b", file))]
    (state / "config" / "edgellm.toml").write_text(config_text(*models, top=LIMIT))
    with Served(state) as up:
        up.ready("a")
        with waiting(up, "b", "b") as (served_, *lost):
            file.unlink()
        assert served_.result().status_code == 200
        for each in lost:
            answer = each.result()
            assert answer.status_code == 503 and answer.json()["error"]["hint"], answer.text
        assert up.model("b")["state"] == "FAILED"
        assert ask(up, "a").status_code == 200
        shutil.copy(smollm2, file)
        up.cli("restart", "b")
        up.ready("b")
        assert up.model("a")["state"] == "SLEEPING", "the restart asked for room"


def test_another_engine_that_is_never_ready_holds_nothing_up(smollm2: Path, tmp_path: Path) -> None:
    """It neither works nor serves: its start is given up, and the model that waited for its memory follows."""
    command = json.dumps([sys.executable, "-c", "import time; time.sleep(3600)", "{port}"])
    idle = f'id = "idle"\ncommand = {command}\nmemory = "200MiB"\nroutes = ["/v1/idle"]\npreload = false'
    top = f"{LIMIT}\n[restart]\nstall_s = 1\nbackoff_s = [0, 0.1]"
    models = entry("a", smollm2, "preload = false"), idle
    with served(tmp_path, *models, top=top, ready=False) as up, ThreadPoolExecutor(2) as pool:
        eventually(lambda: up.healthz(), "it answers")
        never = pool.submit(ask_idle, up)
        eventually(lambda: up.model("idle")["state"] != "SLEEPING", lambda: str(up.status()))
        assert ask(up, "a").status_code == 200
        answer = never.result()
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "stalled")
        assert up.model("idle")["state"] == "FAILED"


def test_another_engine_that_is_never_ready_can_be_put_to_sleep(smollm2: Path, tmp_path: Path) -> None:
    """It writes a line each moment, so that its start is no stall: `unload` ends it, and who waits longest follows."""
    code = "import time\nwhile True: print(0, flush=True); time.sleep(0.1)"
    command = json.dumps([sys.executable, "-c", code, "{port}"])
    idle = f'id = "idle"\ncommand = {command}\nmemory = "200MiB"\nroutes = ["/v1/idle"]\npreload = false'
    with (
        served(tmp_path, entry("a", smollm2, "preload = false"), idle, top=LIMIT, ready=False) as up,
        ThreadPoolExecutor(1) as pool,
    ):
        eventually(lambda: up.healthz(), "it answers")
        with socket.create_connection(("127.0.0.1", up.port)) as client:
            client.sendall(post("/v1/idle", b'{"model": "idle"}'))
            eventually(lambda: up.model("idle")["state"] == "STARTING", lambda: str(up.status()))
            waits = pool.submit(ask, up, "a")
            eventually(lambda: requests_open(up) == 2, lambda: str(up.status()))
            up.cli("unload", "idle")
            assert waits.result().status_code == 200, "a has waited for its memory"


def post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ask_idle(up: Served) -> httpx.Response:
    return httpx.post(f"{up.url}/v1/idle", json={"model": "idle"}, timeout=60)


@pytest.fixture
def two(smollm2: Path, tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, entry("a", smollm2), entry("b", smollm2), top=LIMIT, ready=False) as up:
        up.ready("a")
        yield up


def test_a_reload_that_removes_a_model_answers_those_that_wait_for_it(two: Served, smollm2: Path) -> None:
    with waiting(two, "b") as (_, lost):
        two.configure(entry("a", smollm2), top=LIMIT)
        assert two.reload()["models"] == {"a": "kept", "b": "removed"}
        answer = lost.result(30)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "removed")
    assert ask(two, "a").status_code == 200
    assert len(two.pids) == 1


def test_a_reload_that_changes_a_model_keeps_the_place_of_those_that_wait(two: Served, smollm2: Path) -> None:
    with waiting(two, "b") as asked:
        two.configure(entry("a", smollm2), entry("b", smollm2).replace("512", "768"), top=LIMIT)
        assert two.reload()["models"] == {"a": "kept", "b": "asleep"}
    assert [each.result().status_code for each in asked] == [200, 200]
    assert (two.model("a")["state"], len(two.pids)) == ("SLEEPING", 2)
    assert "768" in Path(f"/proc/{two.ready('b')['pid']}/cmdline").read_text().split("\0")


def test_a_reload_that_changes_a_model_while_it_leaves_does_not_bring_it_back(two: Served, smollm2: Path) -> None:
    """It makes room for b: its new engine starts with its next request, not beside the engine of b."""
    with ThreadPoolExecutor(1) as pool:
        with stopped(two.model("a")["pid"]):
            # Its process is stopped: it stays in the middle of its end until it is killed, or has ended by then.
            two.client.unload("a")
            eventually(lambda: two.model("a")["state"] != "READY", lambda: str(two.status()))
            two.configure(entry("a", smollm2).replace("512", "768"), entry("b", smollm2), top=LIMIT)
            reloading = pool.submit(two.reload)
        assert reloading.result()["models"] == {"a": "asleep", "b": "kept"}
    assert ask(two, "b").status_code == 200
    assert (two.model("a")["state"], len(two.pids)) == ("SLEEPING", 2)


def test_a_client_that_leaves_in_the_middle_of_an_eviction(two: Served) -> None:
    """The victim ends, nothing starts in its place, and its next request brings it back."""
    body = b'{"model": "b", "messages": [{"role": "user", "content": "Hi"}]}'
    pid = two.model("a")["pid"]
    with socket.create_connection(("127.0.0.1", two.port)) as client, stopped(pid):
        client.sendall(post("/v1/chat/completions", body))
        eventually(lambda: two.model("a")["state"] != "READY", lambda: str(two.status()))
        client.close()
        eventually(lambda: requests_open(two) == 0, "the client has left")
    eventually(lambda: two.model("a")["state"] == "SLEEPING", lambda: str(two.status()))
    assert ask(two, "a").status_code == 200
    assert two.model("b")["state"] == "SLEEPING"
