"""The gateway inside `edgellm up`, on the real engine and the real model."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.upstream.real import get
from tests.serving import PATIENCE_S, Up, edgellm, eventually, stopped

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def up(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    stray = {"LLAMA_ARG_TOOLS": "all", "LLAMA_ARG_UI_MCP_PROXY": "1", "LLAMA_ARG_CORS_ORIGINS": "*"}
    state = tmp_path_factory.mktemp("up")
    with Up(state, "-p", "cpu", "-m", f"demo={smollm2}", "--set", "n_ctx=2048", env=stray) as running:
        running.wait_for("ok")
        yield running


@pytest.mark.parametrize("path", ["/tools", "/cors-proxy?url=http://127.0.0.1:1/", "/%74ools", "/upstream/demo/tools"])
def test_a_stray_variable_of_the_caller_opens_no_tools(up: Up, path: str) -> None:
    for method in ("GET", "POST"):
        assert httpx.request(method, up.url + path, timeout=PATIENCE_S).status_code == 403


def test_not_even_the_engine_behind_it_has_them(up: Up) -> None:
    (socket,) = [path for path in Path(up.status()["folders"]["run"]).glob("*.sock") if path.name != "control.sock"]
    status, body = get(socket, "/tools")
    assert status in (401, 403), body


def test_metrics_tell_the_state_and_the_gates(up: Up) -> None:
    assert up.chat().status_code == 200
    text = httpx.get(f"{up.url}/metrics", timeout=PATIENCE_S).text
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["edgellm_model_state", "READY", "demo"] == 1
    assert samples["edgellm_gate_open", "demo", "warm"] == 1
    assert samples["edgellm_tokens_total", "completion", "demo"] >= 1


def test_chat_from_the_command_line_finds_the_running_server(up: Up) -> None:
    done = edgellm("chat", "Say hello.", "--max-tokens", "8", "--json", "--state-dir", str(up.state))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["text"] and document["usage"]["completion_tokens"] <= 8


def test_a_key_that_is_made_while_it_runs_is_asked_for_at_once(up: Up) -> None:
    made = edgellm("key", "add", "laptop", "--state-dir", str(up.state))
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    try:
        assert up.chat().status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{up.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code == 200
        assert httpx.get(f"{up.url}/healthz", timeout=PATIENCE_S).status_code == 200
        asked = ["chat", "Hi", "--max-tokens", "2", "--state-dir", str(up.state)]
        assert edgellm(*asked).returncode == 69
        assert edgellm(*asked, env={"EDGELLM_API_KEY": key}).returncode == 0
    finally:
        assert edgellm("key", "revoke", "laptop", "--force", "--state-dir", str(up.state)).returncode == 0
    assert up.chat().status_code == 200
    assert key not in up.output


def test_ollamas_keep_alive_lets_the_model_sleep_and_the_next_request_wakes_it(up: Up) -> None:
    shown = httpx.post(f"{up.url}/api/show", json={"model": "demo"}, timeout=PATIENCE_S).json()
    assert shown["capabilities"] == ["completion"] and shown["model_info"]["general.parameter_count"] > 1e8
    asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": False, "keep_alive": 0}
    answer = httpx.post(f"{up.url}/api/chat", json=asked, timeout=60)
    assert answer.status_code == 200 and answer.json()["message"]["content"]
    ready = f"{up.url}/readyz/demo"
    eventually(
        lambda: httpx.get(ready, timeout=PATIENCE_S, verify=False).json()["state"] == "SLEEPING", "it does not sleep"
    )
    assert httpx.get(f"{up.url}/api/ps", timeout=PATIENCE_S).json()["models"] == []
    assert httpx.post(f"{up.url}/api/generate", json={"model": "demo", "keep_alive": -1}, timeout=60).status_code == 200
    assert httpx.get(ready, timeout=PATIENCE_S).json()["state"] == "READY"


def test_the_access_log_is_in_the_run_folder(up: Up) -> None:
    assert up.chat("a secret question").status_code == 200
    path = Path(up.status()["folders"]["run"]) / "log" / "access.log"
    # A thread writes it, after the answer.
    eventually(lambda: "POST /v1/chat/completions 200 ok" in path.read_text(), "the request is in no line")
    text = path.read_text()
    assert "model=demo tokens=" in text
    assert "secret question" not in text
    assert path.stat().st_mode & 0o077 == 0


def test_requests_that_an_engine_dies_with_are_answered_by_the_next_one(up: Up) -> None:
    """Non-streamed, so that no byte has gone out: the client sees a longer wait and nothing else."""
    pid = up.child_pid()
    with ThreadPoolExecutor(3) as clients:
        with stopped(pid):  # or a fast machine has answered before it is killed
            asked = [clients.submit(up.chat, f"Count to {n}.", max_tokens=40, ignore_eos=True) for n in range(3)]
            gateway = f"{up.url}/telemetry"
            eventually(
                lambda: httpx.get(gateway, timeout=PATIENCE_S, verify=False).json()["gateway"]["demo"]["in_flight"],
                "no request is in flight",
            )
            os.kill(pid, signal.SIGKILL)
        answers = [each.result() for each in asked]
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    assert all(answer.json()["usage"]["completion_tokens"] == 40 for answer in answers)
    assert up.child_pid() != pid
    metrics = httpx.get(f"{up.url}/metrics", timeout=PATIENCE_S).text
    (retries,) = re.findall(r'edgellm_requests_retries_total\{model="demo"\} (\S+)', metrics)
    assert float(retries) >= 1
