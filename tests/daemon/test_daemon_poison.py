"""A request that ends each engine it reaches: the real gateway and supervisor over the fake llama-server.

However it comes (held at a start, streamed because it is large, as the first or a later request), it costs two engines.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon.served import Served, served
from tests.serving import PATIENCE_S, eventually

POISON = "fatal grammar"
FAST = "[restart]\nbackoff_s = [0]\n"


def send(up: Served, answers: list[httpx.Response], text: str = POISON, **more: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(up.chat(text, **more)))
    thread.start()
    return thread


def waiting(up: Served) -> bool:
    lines = httpx.get(f"{up.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return any(line.startswith("edgellm_requests_waiting") and line.endswith(" 1.0") for line in lines)


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["kind"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_poison_request_that_is_held_at_a_start_costs_two_engines(
    short_dir: Path, smollm2: Path, stream: bool
) -> None:
    """It is the first of the first engine, whose death counted for nothing: two more died of it.

    The fake prints an allocator's message before it crashes, as an engine prints a client's text: no rung is lost.
    """
    go = short_dir / "go"
    model = f'id = "chat"\nref = "{smollm2}"'
    with served(short_dir, model, top=FAST, ready=False, poison=POISON, silent_until=str(go)) as up:
        eventually(up.healthz, "it listens")
        answers: list[httpx.Response] = []
        thread = send(up, answers, stream=stream)
        eventually(lambda: waiting(up), "the request is held")
        go.touch()
        thread.join()
        assert kind(answers[0]) == (422, "kills_engine"), up.output
        assert up.ready()["rung"] == 0 and len(up.pids) == 3, "two died, the third serves"
        kinds = {event["kind"] for event in up.events() if event.get("event") == "failed"}
        assert kinds == {"signal_segv"}
        assert up.chat("Hello").status_code == 200 and kind(up.chat(POISON, stream=stream)) == (422, "kills_engine")
        assert len(up.pids) == 3


def test_a_large_poison_request_costs_two_engines(short_dir: Path, smollm2: Path) -> None:
    """It is sent on as it comes and not kept, so that it had no identity: each repetition killed one more engine."""
    with served(short_dir, f'id = "chat"\nref = "{smollm2}"', top=FAST, poison=POISON) as up:
        large = POISON + "x" * 600_000
        seen = []
        for _ in range(4):
            pid = up.ready()["pid"]
            seen.append(kind(up.chat(large)))
            if seen[-1][0] == 502:
                eventually(lambda pid=pid: up.model()["pid"] != pid, "its exit is seen")  # type: ignore[misc]
        assert [status for status, _ in seen] == [502, 502, 422, 422], seen
        up.ready()
        assert len(up.pids) == 3
        assert up.chat("y" * 600_000).status_code == 200, "another one is served"
