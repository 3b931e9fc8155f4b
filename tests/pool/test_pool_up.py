"""`edgellm up` with more models than memory: they take turns, and every request is answered."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from threading import Event

import httpx
import pytest

from edge.errors import EdgeError, UsageError
from tests.daemon.served import Served, served
from tests.serving import PATIENCE_S, eventually, stopped

# One plan of the demo model without a prompt cache takes 178 MiB: one fits, two do not.
LIMIT = '[memory]\nlimit = "300MiB"'


def entry(model_id: str, file: Path, more: str = "") -> str:
    return f'id = "{model_id}"\nref = "{file}"\nset = {{ n_ctx = 512, n_threads = 1 }}\n{more}'


@pytest.fixture(scope="module")
def two(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = entry("a", smollm2, 'aliases = ["first"]\nttl_s = 3600'), entry("b", smollm2)
    with served(tmp_path_factory.mktemp("pool"), *models, top=LIMIT, ready=False) as up:
        up.ready("a")
        yield up


def ask(up: Served, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    return httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60, verify=False)


def states(up: Served) -> dict[str, str]:
    return {name: model["state"] for name, model in up.status()["models"].items()}


def test_only_what_fits_is_started(two: Served) -> None:
    assert two.model("b")["state"] in ("SLEEPING", "READY")
    assert sum(state == "READY" for state in states(two).values()) == 1


def test_a_request_for_the_other_puts_the_idle_one_to_sleep(two: Served) -> None:
    for name, other in (("b", "a"), ("a", "b"), ("first", "b")):
        assert ask(two, name).status_code == 200
        assert two.model(other)["state"] == "SLEEPING"


def test_a_mixture_of_requests_is_answered_with_few_changes(two: Served) -> None:
    two.client.load("a")
    before = len(two.pids)
    with ThreadPoolExecutor(8) as pool:
        with stopped(two.model("a")["pid"]):  # none is answered before all are there
            asked = [pool.submit(ask, two, "a")]
            eventually(lambda: requests_open(two) == 1, "a is busy")  # idle it would be evicted for b at once
            asked += [pool.submit(ask, two, name) for name in ["b", "a"] * 3 + ["b"]]
            eventually(lambda: requests_open(two) == 8, "eight requests")
        answers = [each.result().status_code for each in asked]
    assert answers == [200] * 8
    # a a a a b b b b costs one start, and at most one more of each where the pool changed its mind.
    assert len(two.pids) - before <= 3


def requests_open(up: Served) -> int:
    activity = httpx.get(f"{up.url}/telemetry", timeout=PATIENCE_S, verify=False).json()["gateway"].values()
    return sum(model[place] for model in activity for place in ("in_flight", "queued", "waiting"))


def test_ps_load_and_unload(two: Served) -> None:
    assert "a is READY" in two.cli("load", "a")
    two.chat(model="a", max_tokens=16)
    rows = json.loads(two.cli("ps", "--json"))["models"]
    assert rows["a"]["tokens_per_s"] > 0
    assert rows["a"]["memory_bytes"]["host"] > 100 << 20
    assert (rows["a"]["state"], rows["a"]["open_requests"], rows["b"]["state"]) == ("READY", 0, "SLEEPING")
    assert rows["b"]["idle_s"] is rows["b"]["ttl_left_s"] is None
    assert rows["a"]["ttl_left_s"] == pytest.approx(3600 - rows["a"]["idle_s"], abs=0.2)
    table = two.cli("ps").splitlines()
    assert table[0].split() == ["MODEL", "STATE", "MEMORY", "OPEN", "TOK/S", "IDLE", "SLEEPS", "IN"]
    assert all(len(line) <= 80 for line in table)
    assert table[1].split()[-1] in ("s", "min", "h"), "and until it sleeps"
    assert float(table[1].split()[5]) == pytest.approx(rows["a"]["tokens_per_s"], abs=0.06)
    asked = {"model": "a", "keep_alive": 600}
    assert httpx.post(f"{two.url}/api/generate", json=asked, timeout=PATIENCE_S, verify=False).status_code == 200
    row = json.loads(two.cli("ps", "--json"))["models"]["a"]
    assert row["ttl_left_s"] == pytest.approx(600 - row["idle_s"], abs=0.2), "of a client, in place of ttl_s"
    (loaded,) = httpx.get(f"{two.url}/api/ps", timeout=PATIENCE_S, verify=False).json()["models"]
    expires_s = datetime.fromisoformat(loaded["expires_at"].replace("Z", "+00:00")).timestamp()
    assert 0 < expires_s - time.time() <= 600
    two.cli("unload", "first")
    eventually(lambda: two.model("a")["state"] == "SLEEPING", "a sleeps")
    with pytest.raises(UsageError, match="no model is called nosuch"):
        two.client.load("nosuch")
    assert ask(two, "a").status_code == 200


def test_a_restart_of_all_wakes_nothing(two: Served) -> None:
    two.client.load("a")
    pid, starts = two.model("a")["pid"], len(two.pids)
    said = two.cli("restart").splitlines()
    assert said == ["restarting a", "b stays asleep: `edgellm load b` starts it"]
    eventually(lambda: two.model("a")["pid"] not in (None, pid), "a has another engine")
    two.ready("a")
    assert (two.model("b")["state"], len(two.pids) - starts) == ("SLEEPING", 1)


def test_a_restart_of_one_that_sleeps_puts_the_other_to_sleep_first(two: Served) -> None:
    two.client.load("a")
    assert two.cli("restart", "b") == "restarting b\n"
    two.ready("b")
    assert two.model("a")["state"] == "SLEEPING"


@pytest.mark.slow
def test_a_model_that_is_never_idle_gives_way_after_its_turn(smollm2: Path, tmp_path: Path) -> None:
    """Requests for a overlap without a pause. After ten seconds new ones wait until b has answered."""
    with served(tmp_path, entry("a", smollm2), entry("b", smollm2), top=LIMIT, ready=False, slow_s=1.0) as up:
        up.ready("a")
        answered = Event()

        def keep_busy(number: int) -> list[int]:
            answered.wait(number / 3)  # they end one after the other
            codes = [ask(up, "a").status_code]
            while not answered.is_set():
                codes.append(ask(up, "a").status_code)
            return codes

        with ThreadPoolExecutor(3) as pool:
            busy = [pool.submit(keep_busy, number) for number in range(3)]
            try:
                eventually(lambda: requests_open(up) >= 2, "a is busy")
                assert ask(up, "b").status_code == 200
            finally:
                answered.set()
            assert {code for each in busy for code in each.result()} == {200}


def test_a_request_of_higher_priority_overtakes_the_queue(smollm2: Path, tmp_path: Path) -> None:
    models = [entry(name, smollm2, f"priority = {rank}") for name, rank in (("a", 0), ("b", 0), ("c", 2))]
    with served(tmp_path, *models, top=LIMIT, ready=False) as up, ThreadPoolExecutor(3) as pool:
        eventually(lambda: up.healthz(), "it answers")
        up.client.load("a")
        with stopped(up.model("a")["pid"]):
            asked = []
            for number, name in enumerate("abc", start=1):
                asked.append(pool.submit(ask, up, name))
                eventually(lambda number=number: requests_open(up) == number, lambda: str(up.status()))
        assert [each.result().status_code for each in asked] == [200] * 3

        def ready() -> list[str]:
            return [event["model"] for event in up.events() if event.get("state") == "READY"]

        eventually(lambda: {"b", "c"} <= set(ready()), lambda: up.output)  # an answer may come before READY
        assert ready()[-2:] == ["c", "b"]


def test_a_client_that_leaves_the_queue_starts_nothing(smollm2: Path, tmp_path: Path) -> None:
    with served(tmp_path, entry("a", smollm2), entry("b", smollm2), top=LIMIT, ready=False) as up:
        up.ready("a")
        with ThreadPoolExecutor(1) as pool:
            with stopped(up.model("a")["pid"]):
                busy = pool.submit(ask, up, "a")
                eventually(lambda: requests_open(up) == 1, "a is busy")
                body = b'{"model": "b", "messages": [{"role": "user", "content": "Hi"}]}'
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
                with socket.create_connection(("127.0.0.1", up.port)) as client:
                    client.sendall(head.encode() + body)
                    eventually(lambda: requests_open(up) == 2, "b waits")
                eventually(lambda: requests_open(up) == 1, "the client has left")
            assert busy.result().status_code == 200
        assert ask(up, "a").status_code == 200
        assert (up.model("b")["state"], len(up.pids)) == ("SLEEPING", 1)


def test_every_waiter_is_answered_though_the_engine_dies_twice(smollm2: Path, tmp_path: Path) -> None:
    models = [entry(name, smollm2, "preload = false") for name in "ab"]
    top = f"{LIMIT}\n[restart]\nbackoff_s = [0, 0.05]"
    dying = {"first_starts": 2, "first": {"death": {"at": "loading", "code": 1}}}
    with served(tmp_path, *models, top=top, **dying) as up, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(up, "b"), range(4)))
        assert [each.status_code for each in answers] == [200] * 4
        assert len(up.pids) == 3, "they join one start"
        assert ask(up, "a").status_code == 200


def test_a_pinned_model_stays_and_the_other_is_refused(smollm2: Path, tmp_path: Path) -> None:
    models = entry("a", smollm2, "pin = true\npriority = 1"), entry("b", smollm2)
    with served(tmp_path, *models, top=LIMIT, ready=False) as up:
        up.ready("a")
        answer = ask(up, "b")
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "no_room")
        assert "unload or unpin" in answer.json()["error"]["hint"]
        with pytest.raises(EdgeError, match="beside a, which is pinned"):
            up.client.load("b")
        assert up.model("a")["state"] == "READY"
        assert ask(up, "a").status_code == 200


def test_the_small_model_comes_back_when_the_large_one_sleeps(smollm2: Path, tmp_path: Path) -> None:
    models = entry("small", smollm2), entry("large", smollm2, 'ttl_s = 1\nreturn_to = "small"')
    with served(tmp_path, *models, top=LIMIT, ready=False) as up:
        up.ready("small")
        assert ask(up, "large").status_code == 200
        slept = [event for event in up.events() if event.get("model") == "small" and event.get("state") == "SLEEPING"]
        assert slept, "it gave way"
        up.ready("small")
        assert up.model("large")["state"] == "SLEEPING"


def test_the_list_states_what_is_in_memory_how_large_it_is_and_how_long_it_loads(two: Served) -> None:
    two.client.load("a")
    listed = {
        each["id"]: each["edgellm"] for each in httpx.get(f"{two.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    }
    assert (listed["a"]["state"], listed["first"]["state"], listed["b"]["state"]) == ("READY", "READY", "SLEEPING")
    assert listed["a"]["size_bytes"] == listed["b"]["size_bytes"] > 50 << 20
    assert 0 < listed["a"]["last_load_s"] < 60
