"""The main job on the real engine and the real model: `edgellm up` serves, through kills and cold starts."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from edge.plan import start_records
from tests.serving import PATIENCE_S, ROOT, Up, alive, children, edgellm, eventually, free_port

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def up(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up"), "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=2048") as running:
        running.wait_for("ok")
        yield running


@pytest.fixture
def client(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", timeout=60, max_retries=0) as sdk:
        yield sdk


def test_the_openai_sdk_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.completion_tokens <= 8


def test_the_openai_sdk_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=8, stream=True
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and len(chunks) >= 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("length", "stop")


def test_the_openai_sdk_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_all_six_gates_are_open_with_evidence(up: Up) -> None:
    (model,) = up.healthz()["models"].values()
    assert list(model["gates"]) == ["driver", "context", "backend", "weights", "kv_cache", "warm"]
    for name, gate in model["gates"].items():
        assert gate["ready"] and gate["evidence"] and gate["took_s"] is not None, name
    assert "no log line shows it" not in str(model["gates"]), "a gate was opened by a probe only"


def test_probes_answer(up: Up) -> None:
    for path in ("/livez", "/readyz", "/readyz/demo", "/health"):
        assert httpx.get(up.url + path, timeout=PATIENCE_S).status_code == 200, path


def test_the_start_record_tells_where_the_time_went(up: Up) -> None:
    starts = up.state / "state" / "main" / "starts.jsonl"
    record = eventually(lambda: start_records.read(starts), "the start is recorded")[0]
    spans = {span["name"]: span for span in record["spans"]}
    assert record["outcome"] == "ready" and record["model"] == "demo" and record["rung"] == 0
    assert 0 < record["spawn_s"] <= record["engine_ready_s"] <= record["ready_s"]
    assert {"python", "configure", "plan", "spawn", "engine", "weights", "kv_cache", "warm"} <= set(spans)
    assert spans["weights"]["bytes"] > 90_000_000
    assert all(span["end_s"] >= span["start_s"] >= 0 for span in spans.values())


def test_requests_of_the_first_moment_are_answered(smollm2: Path, tmp_path: Path) -> None:
    port = free_port()
    with Up(tmp_path, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=1024", port=port) as running:

        def connected() -> socket.socket | None:
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=60)
            except ConnectionRefusedError:
                return None

        with eventually(connected, "the port is bound") as early:
            body = b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":2}'
            early.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            answer = b""
            while piece := early.recv(65536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
        assert b'"completion_tokens"' in answer
        running.wait_for("ok")


def test_a_killed_engine_is_back_for_the_next_request(smollm2: Path, tmp_path: Path) -> None:
    with Up(tmp_path, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=1024") as running:
        running.wait_for("ok")
        former = running.child_pid()
        eventually(lambda: running.chat().status_code == 200, "it serves before the kill")
        os.kill(former, signal.SIGKILL)
        eventually(lambda: not alive(former), "the engine is dead")
        answer = running.chat()
        assert answer.status_code == 200, answer.text
        (model,) = running.wait_for("ok")["models"].values()
        assert (model["rung"], model["restarts"], model["state"]) == (0, 1, "READY")
        assert children(running.process.pid) == [running.child_pid()], "no zombie, no orphan"
        crashes = tmp_path / "state" / "main" / "crashes.jsonl"
        crash = eventually(lambda: start_records.read(crashes), "the crash is recorded")[-1]
        assert (crash["kind"], crash["state"], crash["rung"]) == ("killed", "READY", 0)


def test_a_killed_supervisor_leaves_no_engine(smollm2: Path, tmp_path: Path) -> None:
    """FC-32: the engine must not outlive its supervisor."""
    with Up(tmp_path, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=1024") as running:
        running.wait_for("ok")
        engine = running.child_pid()
        running.process.kill()
        running.process.wait()
        eventually(lambda: not alive(engine), "the engine died with its supervisor")


def test_ctrl_c_ends_it_cleanly(smollm2: Path, tmp_path: Path) -> None:
    with Up(tmp_path, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=1024") as running:
        running.wait_for("ok")
        engine = running.child_pid()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE_S) == 0
        assert not alive(engine)
        assert [path.name for path in (tmp_path / "run" / "main").glob("*.sock")] == []


def test_ctrl_c_in_the_middle_of_a_start_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    for moment in range(4):
        with Up(tmp_path, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=1024") as running:
            if moment:  # at once, with the engine spawned, with the gateway up, while loading
                eventually(lambda: children(running.process.pid), "an engine is spawned")
            if moment > 1:
                eventually(running.healthz, "the gateway answers")
            engines = children(running.process.pid) if running.process.poll() is None else []
            running.process.send_signal(signal.SIGINT)
            code = running.process.wait(PATIENCE_S)
            # Python ends with 1 where the signal meets its own imports, before a line of edgellm has run.
            early = not moment and "KeyboardInterrupt" in running.output and f"{ROOT}/edge" not in running.output
            assert code in (0, 130, -signal.SIGINT) or (early and code == 1), running.output
            eventually(lambda engines=engines: not any(alive(pid) for pid in engines), "no orphan")
            assert list((tmp_path / "run").rglob("*.sock")) == []


def test_what_the_engine_took_corrects_the_next_plan(up: Up) -> None:
    path = up.state / "state" / "calibration.json"
    eventually(path.exists, "the engine's memory is recorded")
    engines = json.loads(path.read_text())["engines"]
    (engine,) = engines.values()
    ((key, row),) = engine.items()
    assert key.startswith("llama")
    last = row["last"]
    assert last["weights_bytes"] == pytest.approx(96_576_768, rel=0.05)
    assert last["kv_bytes"] == 2048 * 23_040 and last["rss_bytes"] > 100_000_000


def test_a_second_start_of_the_same_plan_is_not_learnt_again(up: Up) -> None:
    """Its plan was not made with what the first start taught: factors would multiply with every sleep and wake."""
    path, starts = up.state / "state" / "calibration.json", up.state / "state" / "main" / "starts.jsonl"
    eventually(path.exists, "the first start is recorded")
    before, count = path.read_text(), len(starts.read_text().splitlines())
    for number in (1, 2):  # what the former start teaches is written before the record of the next
        assert edgellm("restart", "--state-dir", str(up.state)).returncode == 0
        eventually(lambda more=number: len(starts.read_text().splitlines()) >= count + more, "the start is recorded")
        up.wait_for("ok")
    assert path.read_text() == before
