"""/metrics, read back by the parser of the library that wrote it; /telemetry; the access log; the page."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from edge.errors import ConfigError
from edge.gateway.access_log import AccessLog
from edge.gateway.config import GatewayOptions
from edge.gateway.page import Page
from edge.supervisor.status import Gate, ModelStatus, State
from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rig, Rigs

POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 26\r\n\r\n"
    + b'{"messages":["my secret"]}'
)
USAGE = {
    "usage": {"prompt_tokens": 30, "completion_tokens": 8},
    "timings": {"predicted_per_second": 96.5, "prompt_ms": 20.0},
}


async def scrape(here: Rig) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = await here.once(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.status == 200
    assert (answer.header("content-type") or "").startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


async def stream(line: Line, request: Received) -> None:
    await line.stream()
    await line.chunk(b'data: {"choices":[]}\n\n')
    await line.chunk(b'data: {"choices":[]}\n\n')
    await line.chunk(f"data: {json.dumps({'choices': [], **USAGE})}\n\n".encode())
    await line.chunk(b"data: [DONE]\n\n")
    await line.end()


@pytest.mark.parametrize(("kind", "pauses"), [("text/event-stream", 2), ("application/octet-stream", 0)])
async def test_only_the_pauses_of_event_streams_are_times_between_tokens(rig: Rigs, kind: str, pauses: int) -> None:
    second = asyncio.Event()

    async def pieces(line: Line, request: Received) -> None:
        await line.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode("ascii")
        )
        for _ in range(3):
            second.clear()
            await line.chunk(b"data: x\n\n")
            await second.wait()
        await line.end()

    here = await rig(pieces)
    client = await here.connect()
    await client.send(POST)
    await client.head()
    for _ in range(3):
        await client.chunk()
        second.set()
    assert await client.chunk() == b""
    samples = await scrape(here)
    assert samples[key("edgellm_time_between_tokens_seconds_count", model="chat")] == pauses


async def test_requests_tokens_and_times_are_counted(rig: Rigs) -> None:
    here = await rig(stream)
    for _ in range(3):
        assert (await here.once(POST)).status == 200
    await here.once(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    found = await scrape(here)
    labels = {"route": "/v1/chat/completions", "code": "200", "model": "chat"}
    assert found[key("edgellm_requests_total", **labels)] == 3
    assert found[key("edgellm_requests_total", route="/healthz", code="200", model="")] == 1
    assert found[key("edgellm_tokens_total", model="chat", kind="prompt")] == 90
    assert found[key("edgellm_tokens_total", model="chat", kind="completion")] == 24
    assert found[key("edgellm_tokens_per_second", model="chat")] == 96.5
    assert found[key("edgellm_time_to_first_token_seconds_count", model="chat")] == 3
    assert found[key("edgellm_request_duration_seconds_count", model="chat")] == 3
    assert found[key("edgellm_requests_in_flight", model="chat")] == 0


DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
ERROR = b'data: {"error":{"code":500,"message":"Failed to parse"}}\n\n'
LONG = b'data: {"choices":[{"delta":{"content":"' + b"y" * 500 + b'"}}]}\n\n'
# llama-server's own last event repeats the prompt.
NATIVE = b'data: {"content":"","stop":true,"prompt":"' + b"word " * 900 + b'","stop_type":"limit","timings":{}}\n\n'
CLAUDE = b'event: content_block_delta\ndata: {"delta":{"type":"text_delta","text":"x"}}\n\n'
QUOTED = json.dumps({"choices": [{"delta": {"content": '\n\ndata: {"error": 1}\n\nevent: error'}}]})


@pytest.mark.parametrize(
    ("route", "chunks", "outcome"),
    [
        ("/v1/chat/completions", [TOKEN, DONE], "ok"),
        ("/v1/chat/completions", [TOKEN, b"data: [DO", b"NE]\n\n"], "ok"),
        ("/v1/chat/completions", [TOKEN, f"data: {QUOTED}\n\n".encode(), DONE], "ok"),
        ("/v1/chat/completions", [TOKEN], "error"),
        ("/v1/chat/completions", [TOKEN, ERROR], "error"),
        ("/v1/chat/completions", [TOKEN, ERROR, DONE], "error"),
        ("/v1/messages", [b"event: message_start\ndata: {}\n\n", b"event: error\ndata: {}\n\n"], "error"),
        ("/v1/messages", [b"event: message_stop\ndata: {}\n\n"], "ok"),
        ("/v1/responses", [b"event: response.failed\ndata: {}\n\n"], "error"),
        ("/completion", [b'data: {"content":"x","stop":true}\n\n'], "ok"),
        ("/v1/messages", [CLAUDE], "error"),
        ("/v1/messages", [CLAUDE, b'data: {"type":"error","error":{"type":"overloaded_error"}}\n\n'], "error"),
        ("/v1/messages", [CLAUDE, b'data: {"type":"message_stop"}\n\n'], "ok"),
        ("/v1/messages", [b": ping\n\n"], "error"),
        ("/v1/responses", [b'event: response.created\ndata: {"type":"response.created"}\n\n'], "error"),
        ("/v1/responses", [b"event: response.completed\ndata: {" + b'"x":"y",' * 900 + b'"z":1}\n\n'], "ok"),
        ("/v1/responses", [b"event: response.incomplete\ndata: {}\n\n"], "ok"),
        ("/v1/responses", [b'data: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n'], "error"),
        ("/v1/responses", [b'event: error\ndata: {"type":"error","message":"m"}\n\n'], "error"),
        ("/v1/chat/completions", [TOKEN, b'data:{"error":{"message":"x"}}\n\n', DONE], "error"),
        ("/v1/chat/completions", [TOKEN, b'data: {"error":{"message":"x"}}\r\n\r\n', DONE], "error"),
        ("/v1/chat/completions", [TOKEN, b"event:error\ndata: {}\n\n", DONE], "error"),
        ("/v1/chat/completions", [TOKEN, b'data: {"choices":[{"finish_reason":"error"}]}\n\n', DONE], "error"),
        ("/v1/chat/completions", [TOKEN, b'data: {"choices":[],"error":{"code":502}}\n\n', DONE], "error"),
        ("/v1/chat/completions", [TOKEN, b'data: {"object":"error","message":"x"}\n\n', DONE], "error"),
        ("/v1/chat/completions", [TOKEN, b'data: {"err', b'or":{"message":"x"}}\n\n', DONE], "error"),
        ("/v1/chat/completions", [TOKEN, ERROR, *[LONG] * 12, DONE], "error"),
        ("/v1/chat/completions", [TOKEN, *[LONG] * 12, DONE], "ok"),
        ("/v1/chat/completions", [TOKEN, b'data: {"error":null,"choices":[]}\n\n', DONE], "ok"),
        ("/v1/chat/completions", [TOKEN, b"data:[DONE]\n\n"], "ok"),
        ("/v1/chat/completions", [b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\n'], "error"),
        ("/v1/chat/completions", [], "error"),
        ("/completion", [b'data: {"content":"x","stop":false}\n\n'], "error"),
        ("/infill", [b'data: {"content":"x","stop":false}\n\n'], "error"),
        ("/completion", [NATIVE], "ok"),
        ("/infill", [NATIVE], "ok"),
        ("/completions", [NATIVE], "ok"),
        ("/v1/chat/completions", [b'data: {"error":{"message":', b'"x"}}\n\n', *[LONG] * 12, DONE], "error"),
    ],
)
async def test_a_stream_that_fails_is_counted_as_one(
    rig: Rigs, caplog: pytest.LogCaptureFixture, route: str, chunks: list[bytes], outcome: str
) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        for chunk in chunks:
            await line.chunk(chunk)
        await line.end()

    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(script)
    client = await here.connect()
    await client.request("POST", route, b"{}")
    assert (await client.answer()).body == b"".join(chunks)
    found = await scrape(here)
    assert f" 200 {outcome} " in caplog.messages[0]
    assert found[key("edgellm_requests_errors_total", model="chat")] == (outcome == "error")


@pytest.mark.parametrize(
    ("status", "document", "outcome"),
    [
        ("200 OK", {"choices": [], "error": None}, "ok"),
        ("200 OK", {"error": None, "choices": []}, "ok"),
        ("200 OK", {"error": {"message": "x"}}, "error"),
        ("500 Internal Server Error", {"error": {"message": "null in arguments"}}, "error"),
        ("400 Bad Request", {"error": {"message": "no messages"}}, "ok"),
        ("200 OK", {"error": "boom"}, "error"),
        ("200 OK", {"type": "error", "error": {"type": "api_error", "message": "x"}}, "error"),
        ("200 OK", {"object": "error", "message": "x", "code": 400}, "error"),
        ("200 OK", {"code": 500, "error": {"message": "x"}}, "error"),
        ("200 OK", {"error": {"message": "x" * 9000}}, "error"),
        ("200 OK", {"id": "r", "status": "failed", "error": {"code": "server_error"}, "output": []}, "error"),
        ("200 OK", {"choices": [{"message": {"content": ""}, "finish_reason": "error"}]}, "error"),
        ("200 OK", {"choices": [{"message": {"content": '{"error": 1}'}, "finish_reason": "stop"}]}, "ok"),
        ("200 OK", {"tools": [{"properties": {"error": {"type": "string"}}}], "error": None}, "ok"),
        ("200 OK", [{"error": 1}], "ok"),
        ("200 OK", {"usage": {"prompt_tokens": 1e300, "completion_tokens": -4}, "x": "1e400"}, "ok"),
    ],
)
async def test_an_answer_that_reports_an_error_is_counted_as_one(
    rig: Rigs, caplog: pytest.LogCaptureFixture, status: str, document: object, outcome: str
) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.json(document, status)

    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(script)
    assert (await here.once(POST)).status == int(status[:3])
    found = await scrape(here)
    assert f" {status[:3]} {outcome} " in caplog.messages[0]
    assert found[key("edgellm_requests_errors_total", model="chat")] == (outcome == "error")


@pytest.mark.parametrize("number", ["1e400", "9" * 400, "-1e400", "-3", "1e13"])
async def test_a_number_out_of_range_spoils_neither_the_answer_nor_the_counts(rig: Rigs, number: str) -> None:
    body = f'{{"usage":{{"prompt_tokens":{number},"completion_tokens":8}}}}'.encode()

    async def script(line: Line, request: Received) -> None:
        await line.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    here = await rig(script)
    answer = await here.once(POST)
    assert (answer.status, answer.body) == (200, body)
    found = await scrape(here)
    assert found[key("edgellm_tokens_total", model="chat", kind="prompt")] == 0
    assert found[key("edgellm_tokens_total", model="chat", kind="completion")] == 8


@pytest.mark.parametrize(("accept", "shown"), [("*/*", False), ("text/html,application/xhtml+xml", True)])
@pytest.mark.parametrize("status", ["404 Not Found", "502 Bad Gateway"])
async def test_an_html_error_page_is_for_browsers_only(rig: Rigs, accept: str, shown: bool, status: str) -> None:
    page = b"<html>oops</html>"

    async def script(line: Line, request: Received) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n\r\n"
        await line.write(head.encode() + page)

    here = await rig(script)
    client = await here.connect()
    for _ in range(2):
        await client.request("POST", "/v1/chat/completions", b"{}", f"Accept: {accept}")
        answer = await client.answer()
        assert answer.status == int(status[:3])
        assert answer.body == page if shown else json.loads(answer.body)["error"]["kind"] == "engine_error"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        ("502 Bad Gateway", "", b"<html>oops</html>"),
        ("502 Bad Gateway", "application/octet-stream", b"<!DOCTYPE html><p>x"),
        ("502 Bad Gateway", "application/xhtml+xml", b"<?xml version='1.0'?><html/>"),
        ("500 Internal Server Error", "text/plain", b"Internal Server Error"),
        ("500 Internal Server Error", "application/json", b"<html>no json</html>"),
        ("503 Service Unavailable", "Text/HTML; charset=utf-8", b"<html>later</html>"),
        ("200 OK", "text/html", b"<html>log in</html>"),
    ],
)
async def test_what_no_api_client_can_read_becomes_an_error_that_it_can(
    rig: Rigs, caplog: pytest.LogCaptureFixture, route: str, status: str, kind: str, body: bytes
) -> None:
    async def script(line: Line, request: Received) -> None:
        stated = f"Content-Type: {kind}\r\n" if kind else ""
        await line.write(f"HTTP/1.1 {status}\r\n{stated}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(script)
    client = await here.connect()
    question = b'{"model":"chat","messages":[{"role":"user","content":"x"}]}'
    await client.request("POST", route, question, "Accept: */*")
    answer = await client.answer()
    error = json.loads(answer.body)["error"]
    text = error if route == "/api/chat" else error["message"]
    assert answer.status == (502 if status == "200 OK" else int(status[:3]))
    assert f"answered {status[:3]}" in text
    assert f" {answer.status} error " in caplog.messages[0]


async def test_an_ollama_stream_that_breaks_is_counted_as_one(rig: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(TOKEN)
        await line.end()

    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(script)
    client = await here.connect()
    await client.request("POST", "/api/chat", b'{"model":"chat","messages":[{"role":"user","content":"x"}]}')
    last = (await client.answer()).body.splitlines()[-1]
    assert "ended the answer too early" in json.loads(last)["error"]
    assert " 200 error " in caplog.messages[0]


async def test_an_empty_error_of_the_engine_gets_the_envelope(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.write(b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 0\r\n\r\n")

    here = await rig(script)
    answer = await here.once(POST)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["kind"], error["code"]) == (413, "engine_error", 413)


async def test_the_state_of_the_model_is_shown(rig: Rigs) -> None:
    here = await rig(loading=True)
    gates = {"driver": Gate(True, took_s=0.25), "weights": Gate()}
    here.model.state = ModelStatus("chat", State.LOADING, rung=1, gates=gates, progress=0.5, restarts=2)
    found = await scrape(here)
    assert found[key("edgellm_model_state", model="chat", state="LOADING")] == 1
    assert found[key("edgellm_model_state", model="chat", state="READY")] == 0
    assert found[key("edgellm_model_rung", model="chat")] == 1
    assert found[key("edgellm_model_load_progress", model="chat")] == 0.5
    assert found[key("edgellm_gate_open", model="chat", gate="driver")] == 1
    assert found[key("edgellm_gate_open", model="chat", gate="weights")] == 0
    assert found[key("edgellm_gate_seconds", model="chat", gate="driver")] == 0.25
    assert key("edgellm_gate_seconds", model="chat", gate="weights") not in found
    assert found[key("edgellm_upstream_restarts_total", model="chat")] == 2


@pytest.mark.parametrize("when", ["before", "after"])
async def test_others_add_to_the_registry(rig: Rigs, when: str) -> None:
    class Heat:
        def collect(self) -> Iterator[Any]:
            yield GaugeMetricFamily("edgellm_heat_celsius", "A test's.", value=51.0)

    here = await rig()
    if when == "after":
        await scrape(here)
    here.context.metrics.add(Heat())
    assert (await scrape(here))[key("edgellm_heat_celsius")] == 51.0


async def test_paths_that_clients_make_up_do_not_grow_the_metrics(rig: Rigs) -> None:
    here = await rig()
    for number in range(30):
        await here.once(f"GET /made/up/{number} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert [name for name in await scrape(here) if "made" in str(name)] == []
    assert len(here.context.stats.requests) == 2


class Sensors:
    def summary(self) -> dict[str, Any]:
        return {"source": "sysfs", "age_s": 0.5, "thermal": "NOMINAL"}

    def document(self) -> dict[str, Any]:
        return {"schema": 1, **self.summary(), "x": [1]}


async def test_telemetry_carries_what_it_is_given_and_our_activity(rig: Rigs) -> None:
    here = await rig(stream, telemetry=Sensors())
    await here.once(POST)
    document = json.loads((await here.once(b"GET /telemetry HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)
    assert (document["source"], document["x"]) == ("sysfs", [1])
    assert document["gateway"]["chat"]["completion_tokens"] == 8
    health = json.loads((await here.once(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)
    assert health["telemetry"] == {"source": "sysfs", "age_s": 0.5, "thermal": "NOMINAL"}


async def test_a_start_shows_its_elapsed_and_its_expected_seconds(rig: Rigs) -> None:
    here = await rig(loading=True)
    here.model.elapsed, here.model.expected_s = 12.5, 27.5
    document = json.loads((await here.once(b"GET /telemetry HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)
    figures = document["gateway"]["chat"]
    assert (figures["elapsed_s"], figures["expected_ready_in_s"]) == (12.5, 27.5)


@pytest.mark.parametrize("as_json", [False, True])
async def test_one_line_a_request_and_no_prompt(rig: Rigs, caplog: pytest.LogCaptureFixture, as_json: bool) -> None:
    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(stream, config=GatewayOptions(log_json=as_json))
    await here.once(POST)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "edge.access"]
    assert "secret" not in caplog.text
    if as_json:
        entry = json.loads(line)
        assert (entry["code"], entry["model"], entry["completion_tokens"], entry["tokens_per_s"]) == (
            200,
            "chat",
            8,
            96.5,
        )
    else:
        assert re.fullmatch(
            r"POST /v1/chat/completions 200 ok [0-9.]+s model=chat tokens=30\+8 first=[0-9.]+s 96\.5 tok/s", line
        )


async def test_prompts_are_logged_for_those_who_ask_for_them(rig: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(stream, config=GatewayOptions(log_prompts=True))
    await here.once(POST)
    assert "my secret" in caplog.text


async def test_the_page_comes_whole_and_may_load_nothing_from_elsewhere(rig: Rigs) -> None:
    here = await rig()
    answer = await here.once(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (answer.status, answer.header("content-type")) == (200, "text/html; charset=utf-8")
    policy = answer.header("content-security-policy") or ""
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("sha256-") == 2
    text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)|@import|url\(|https?://|style\s*=\s*[\"']", text)


def test_the_policy_follows_the_file() -> None:
    page = Page.load()
    assert page.etag.startswith('"')
    assert len(re.findall("sha256-[A-Za-z0-9+/]{43}=", page.policy)) == 2


async def test_the_log_file_is_private_and_bounded(rig: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.gateway.access_log.SIZE_BYTES", 1000)
    path = tmp_path / "log" / "access.log"
    here = await rig(stream, config=GatewayOptions(access_log=path, log_json=True))
    for _ in range(20):
        await here.once(POST)
    here.context.access_log.drain()
    assert sorted(each.name for each in path.parent.iterdir()) == ["access.log", "access.log.1"]
    for each in path.parent.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        assert each.stat().st_size <= 1000
        assert all(json.loads(line)["code"] == 200 for line in each.read_text().splitlines())


def test_a_log_that_cannot_be_opened_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        AccessLog(tmp_path / "file" / "access.log")
