"""Ollama's API: requests of its clients translated for llama-server, answers translated back (FC-89)."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.gateway import ollama_answer
from edge.gateway.config import GatewayOptions
from edge.gateway.ollama import OllamaCall, read_call
from edge.gateway.ollama_answer import OllamaAnswer
from edge.gateway.openai import RejectedError
from edge.supervisor.status import State
from tests.fakes.gguf_writer import Gguf
from tests.fakes.upstream.engine import Line, Received
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rig, Rigs

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 8).decode()
HELLO = [{"role": "user", "content": "hi"}]
TIMINGS = {"cache_n": 4, "prompt_n": 26, "prompt_ms": 31.25, "predicted_n": 8, "predicted_ms": 80.0}


def translated(route: str, asked: dict[str, Any]) -> tuple[OllamaCall, dict[str, Any]]:
    call = read_call(route, json.dumps(asked).encode())
    return call, json.loads(call.body)


def test_options_format_and_think_have_llama_servers_names() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    options = {"num_predict": 5, "temperature": 0, "top_k": 3, "num_ctx": 99, "seed": 7, "stop": ["x"], "num_gpu": 1}
    call, body = translated(
        "/api/chat", {"model": "chat", "messages": HELLO, "options": options, "format": schema, "think": False}
    )
    assert (call.target, call.stream, body["stream"]) == ("/v1/chat/completions", True, True)
    wanted = {"max_tokens": 5, "temperature": 0, "top_k": 3, "seed": 7, "stop": ["x"]}
    assert {name: body[name] for name in wanted} == wanted
    assert not {"num_ctx", "num_gpu", "num_predict"} & body.keys()
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    _, body = translated("/api/chat", {"model": "c", "messages": HELLO, "format": "json", "think": "low"})
    assert body["response_format"] == {"type": "json_object"}
    assert body["chat_template_kwargs"]["reasoning_effort"] == "low"
    for limit, most in ((-1, None), (-2, None), (0, None), (6.0, 6), (6, 6)):
        _, body = translated("/api/chat", {"model": "c", "options": {"num_predict": limit}})
        assert body.get("max_tokens") == most


def test_images_and_tools_have_openais_shape() -> None:
    messages = [
        {"role": "user", "content": "what is it?", "images": [PNG]},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [
                {"function": {"name": "a", "arguments": {"x": 1}}},
                {"function": {"name": "b", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "2", "tool_name": "b"},
        {"role": "tool", "content": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "a", "parameters": {}}}]
    _, body = translated("/api/chat", {"model": "c", "messages": messages, "tools": tools})
    image, asks, second, first = body["messages"]
    assert image["content"][0]["image_url"]["url"] == "data:image/png;base64," + PNG
    assert image["content"][1] == {"type": "text", "text": "what is it?"}
    assert asks["reasoning_content"] == "hm"
    assert [each["function"]["arguments"] for each in asks["tool_calls"]] == ['{"x": 1}', "{}"]
    idents = [each["id"] for each in asks["tool_calls"]]
    assert [first["tool_call_id"], second["tool_call_id"]] == idents
    assert body["tools"] == tools


@pytest.mark.parametrize(
    ("asked", "target", "has"),
    [
        ({"prompt": "hi", "system": "be brief"}, "/v1/chat/completions", "messages"),
        ({"prompt": "hi", "raw": True}, "/v1/completions", "prompt"),
        ({"prompt": "def f(", "suffix": "return"}, "/infill", "input_suffix"),
        ({"prompt": "", "images": [PNG]}, "/v1/chat/completions", "messages"),
    ],
)
def test_generate(asked: dict[str, Any], target: str, has: str) -> None:
    call, body = translated("/api/generate", {"model": "c", **asked})
    assert call.target == target
    assert has in body
    assert not call.only_loads


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0.0), ("0", 0.0), (-1, -1.0), ("-1m", -60.0), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25), (None, None)]
    + [(value, -1.0) for value in (10**400, "inf", "nan", "1e400", "9" * 400 + "h", 1e308)],
)
def test_keep_alive(value: object, seconds: float | None) -> None:
    assert translated("/api/chat", {"model": "c", "keep_alive": value})[0].keep_alive_s == seconds


@pytest.mark.parametrize(
    "asked",
    [
        b"",
        b"{",
        b"[]",
        b'{"messages": []}',
        b'{"model": "c", "messages": [1]}',
        b'{"model": "c", "messages": 3}',
        b'{"model": "c", "keep_alive": "soon"}',
        b'{"model": "c", "options": {"num_predict": "6"}}',
        b'{"model": "c", "options": {"num_predict": true}}',
        b'{"model": "c", "options": {"num_predict": 1e300}}',
        b'{"model": "c", "format": "yaml"}',
        b'{"model": "c", "format": ["json"]}',
        b'{"model": "c", "options": 3}',
        b'{"model": "c", "messages": [{"images": ["%%%"]}]}',
        b'{"model": "c", "messages": [{"tool_calls": [{}]}]}',
        b"[" * 100_000,
        b'{"model": "c", "messages": [' + b"{}," * 20_000 + b"{}]}",
        b'{"model": "c", "input": [' + b'"",' * 40_000 + b'""]}',
        b'{"model": "c", "messages": "' + b'\\",' * 40_000,
    ],
)
def test_what_cannot_be_translated_is_a_400(asked: bytes) -> None:
    with pytest.raises(RejectedError) as refused:
        read_call("/api/chat", asked)
    assert refused.value.fault.status == 400


def test_a_request_is_not_built_when_it_has_more_values_than_one_needs() -> None:
    """60 MB of `{},` took 6 GB of the gateway."""
    with pytest.raises(RejectedError, match="more than 32768 values"):
        read_call("/api/chat", b'{"model": "c", "messages": [' + b"{}," * 20_000 + b"{}]}")
    with pytest.raises(RejectedError, match="more than 32768 values"):
        read_call("/api/embed", b'{"model": "c", "input": [' + b'"a",' * 40_000 + b'"a"]}')
    text = 'a, b {x} [y] "quoted", C:\\, ' * 20_000
    asked = {"model": "c", "messages": [{"role": "user", "content": text}]}
    assert json.loads(read_call("/api/chat", json.dumps(asked).encode()).body)["messages"][0]["content"] == text


def lines(call: OllamaCall, events: list[Any], cut: int = 7) -> list[dict[str, Any]]:
    answer = OllamaAnswer(call, lambda: 1.0, lambda: 0.0)
    data = b"".join(
        b"data: " + (each.encode() if isinstance(each, str) else json.dumps(each).encode()) + b"\n\n" for each in events
    )
    found = b"".join(answer.feed(data[at : at + cut]) for at in range(0, len(data), cut)) + answer.close()
    return [json.loads(line) for line in found.splitlines()]


def delta(**more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": more}]}


def test_a_stream_is_lines_with_figures_at_its_end() -> None:
    call, _ = translated("/api/chat", {"model": "chat:latest", "messages": HELLO})
    end = {"choices": [{"delta": {}, "finish_reason": "length"}], "timings": TIMINGS}
    found = lines(call, [delta(role="assistant"), delta(reasoning_content="hm"), delta(content="hé"), end, "[DONE]"])
    assert [each["message"].get("thinking") for each in found] == ["hm", None, None]
    assert [each["message"]["content"] for each in found] == ["", "hé", ""]
    assert [each["done"] for each in found] == [False, False, True]
    last = found[-1]
    assert (last["model"], last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == (
        "chat:latest",
        "length",
        30,
        8,
    )
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (31_250_000, 80_000_000)


def test_tool_calls_in_pieces_become_one_line() -> None:
    call, _ = translated("/api/chat", {"model": "c", "messages": HELLO})
    pieces = [
        delta(tool_calls=[{"index": 0, "function": {"name": "add", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
        delta(tool_calls=[{"index": 1, "function": {"name": "now", "arguments": "{}"}}]),
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
        "[DONE]",
    ]
    first, last = lines(call, pieces)
    assert [each["function"] for each in first["message"]["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "now", "arguments": {}},
    ]
    assert (first["done"], last["done"], last["done_reason"]) == (False, True, "stop")


@pytest.mark.parametrize(
    "events", [[delta(content="x"), {"error": {"message": "too long"}}], [delta(content="x")], [delta(content=3)]]
)
def test_a_stream_that_breaks_ends_with_an_error_line(events: list[Any]) -> None:
    call, _ = translated("/api/generate", {"model": "c", "prompt": "hi"})
    found = lines(call, events)
    assert "error" in found[-1]
    assert not any(each.get("done") for each in found)


def test_arguments_without_end_and_figures_out_of_range_spoil_no_answer() -> None:
    call, _ = translated("/api/chat", {"model": "c", "messages": HELLO})
    tool = {"index": 0, "function": {"name": "add", "arguments": "[" * 100_000}}
    absurd = {**TIMINGS, "predicted_ms": 1e303, "prompt_ms": -1.0}
    events = [delta(tool_calls=[tool]), {"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "timings": absurd}]
    first, last = lines(call, [*events, "[DONE]"])
    assert first["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": {}}}]
    assert (last["eval_duration"], last["prompt_eval_duration"]) == (0, 0)


@pytest.mark.parametrize("kind", ["a line without an end", "arguments without an end", "calls without an end"])
def test_what_an_engine_sends_without_an_end_is_kept_to_its_limit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama_answer, "_MOST_KEPT_BYTES", 100_000)
    call, _ = translated("/api/chat", {"model": "chat", "messages": []})
    answer = OllamaAnswer(call, lambda: 1.0, lambda: 0.0)
    said = b""
    for number in range(400):
        piece = {"index": 0, "function": {"arguments": "x" * 1000}}
        calls = [piece] if kind.startswith("arg") else [{"index": number * 10 + at} for at in range(10)]
        event = b"data: " + json.dumps(delta(tool_calls=calls)).encode() + b"\n\n"
        said += answer.feed(b"x" * 1000 if "line" in kind else event)
        assert sum(map(len, answer._pending)) <= 101_000
        assert sum(len(str(each.arguments)) + 500 for each in answer._tools.values()) <= 105_000
    assert b"too large" in said and said.count(b"\n") == 1 and answer.broken


def test_infill_ends_without_done() -> None:
    call, _ = translated("/api/generate", {"model": "c", "prompt": "a", "suffix": "b"})
    events = [{"content": "x", "stop": False}, {"content": "", "stop": True, "stop_type": "eos", "timings": TIMINGS}]
    found = lines(call, events)
    assert [each["response"] for each in found] == ["x", ""]
    assert (found[-1]["done"], found[-1]["eval_count"]) == (True, 8)


@pytest.mark.parametrize(
    ("dimensions", "vector"), [(2, [0.6, 0.8]), (9, [3, 4, 12]), (0, [3, 4, 12]), (None, [3, 4, 12])]
)
def test_embeddings_have_the_dimensions_that_were_asked_for(dimensions: int | None, vector: list[float]) -> None:
    """llama-server ignores them; Ollama cuts a vector and brings it to length 1 again."""
    call, _ = translated("/api/embed", {"model": "c", "input": ["a", "b"], "dimensions": dimensions})
    engines = {"data": [{"embedding": [3, 4, 12]}, {"embedding": [0, 0, 1]}]}
    found = json.loads(OllamaAnswer(call, float, float).whole(json.dumps(engines).encode()))["embeddings"]
    assert found == [pytest.approx(vector), [0, 0, 1][: len(vector)]]


async def post(here: Rig, target: str, asked: object) -> tuple[int, Any]:
    client = await here.connect()
    await client.request("POST", target, json.dumps(asked).encode())
    answer = await client.answer()
    if answer.header("content-type") == "application/x-ndjson":
        return answer.status, [json.loads(line) for line in answer.body.splitlines()]
    return answer.status, json.loads(answer.body)


async def test_each_token_is_passed_on_as_it_comes(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        await line.until_gone()

    here = await rig(script)
    client = await here.connect()
    await client.request("POST", "/api/chat", json.dumps({"model": "chat", "messages": HELLO}).encode())
    assert (await client.head()).header("content-type") == "application/x-ndjson"
    assert json.loads(await client.chunk())["message"]["content"] == "a"
    seen = here.engine.requests[0]
    assert (seen.target, seen.header("content-type")) == ("/v1/chat/completions", "application/json")
    assert seen.header("content-length") == str(len(seen.body))


LONG = "word " * 10


@pytest.mark.parametrize(
    ("asked", "tokens", "sent", "calls"),
    [
        ({"input": [LONG, "a"]}, 30, ["cut", "a"], ["/tokenize", "/detokenize"]),
        ({"input": LONG}, 30, "cut", ["/tokenize", "/detokenize"]),
        ({"input": LONG}, 24, LONG, ["/tokenize"]),
        ({"input": LONG * 1000}, 30, "cut", ["/tokenize", "/detokenize"]),
        ({"input": LONG, "truncate": False}, 30, LONG, []),
        ({"input": ["a", "b"] * 30}, 30, ["a", "b"] * 30, []),
        ({"input": LONG}, None, LONG, ["/tokenize"]),
    ],
)
async def test_a_text_is_cut_to_the_context(
    rig: Rigs, asked: dict[str, Any], tokens: int | None, sent: object, calls: list[str]
) -> None:
    """Only where it is longer, and where the engine can tell; `tokens` None: it cannot."""

    async def script(line: Line, request: Received) -> None:
        if request.target == "/tokenize" and tokens is None:
            await line.json({"error": "no"}, "501 Not Implemented")
        elif request.target == "/tokenize":
            assert len(json.loads(request.body)["content"]) <= 24 * 256, "60 MB make 15 million numbers"
            await line.json({"tokens": list(range(tokens or 0))})
        elif request.target == "/detokenize":
            assert json.loads(request.body)["tokens"] == list(range(24))
            await line.json({"content": "cut"})
        else:
            await line.json({"data": [{"embedding": [1.0]}], "usage": {"prompt_tokens": 3}})

    here = await rig(script)
    here.model.model_info = {"n_ctx": 32}
    status, answer = await post(here, "/api/embed", {"model": "chat", **asked})
    assert (status, answer["embeddings"]) == (200, [[1.0]])
    assert [each.target for each in here.engine.requests] == [*calls, "/v1/embeddings"]
    assert json.loads(here.engine.requests[-1].body)["input"] == sent


async def test_an_answer_that_is_held_whole_counts_as_a_body_that_waits(rig: Rigs) -> None:
    """10 000 embeddings take 400 MB of JSON; a small answer is free, however much waits."""

    async def script(line: Line, request: Received) -> None:
        size = 3_000_000 if b"long" in request.body else 500_000
        await line.json({"choices": [{"message": {"content": "x" * size}}]})

    here = await rig(script, config=GatewayOptions(hold_bytes=1_000_000))
    asked = {"model": "chat", "stream": False}
    status, body = await post(here, "/api/chat", {**asked, "messages": [{"role": "user", "content": "long"}]})
    assert (status, here.context.waiting.held_bytes) == (503, 0)
    assert "gateway.hold.bytes" in str(body)
    status, _ = await post(here, "/api/chat", {**asked, "messages": HELLO})
    assert (status, here.context.waiting.held_bytes) == (200, 0)


async def test_an_engines_error_is_ollamas_error(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.json({"error": {"message": "context too small", "code": 400}}, "400 Bad Request")

    async def brackets(line: Line, request: Received) -> None:
        body = b"[" * 100_000
        head = b"HTTP/1.1 500 No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        await line.write(head + body)

    here = await rig(script)
    assert await post(here, "/api/chat", {"model": "chat", "messages": HELLO}) == (400, {"error": "context too small"})
    here.engine.script = brackets
    status, document = await post(here, "/api/chat", {"model": "chat", "messages": HELLO, "stream": False})
    assert status == 500 and "answered 500" in document["error"], "no mistake of ours"
    await here.model.fail("bad_model", "pull it again")
    status, document = await post(here, "/api/generate", {"model": "chat", "prompt": "hi"})
    assert status == 503 and "pull it again" in document["error"]


async def test_brackets_without_end_are_no_answer(rig: Rigs) -> None:
    deep = b'{"x":' + b"[" * 60_000

    async def stream(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b"data: " + deep + b"\n\n")
        await line.end()

    async def whole(line: Line, request: Received) -> None:
        await line.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(deep) + deep)

    here = await rig(stream)
    client = await here.connect()
    await client.request("POST", "/api/chat", json.dumps({"model": "chat", "messages": HELLO}).encode())
    assert b"cannot be read" in (await client.answer()).body
    here.engine.script = whole
    status, document = await post(here, "/api/chat", {"model": "chat", "messages": HELLO, "stream": False})
    assert status == 502 and "what is no answer" in document["error"], "no mistake of ours"


async def test_an_engine_that_dies_in_mid_answer_ends_with_an_error_line(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        line.cut()

    here = await rig(script)
    client = await here.connect()
    await client.request("POST", "/api/chat", json.dumps({"model": "chat", "messages": HELLO}).encode())
    await client.head()
    rest = await client.rest()
    assert b'"error":' in rest and b'"done":true' not in rest and b"\r\n0\r\n" not in rest


async def test_a_request_without_a_prompt_loads_the_model(rig: Rigs) -> None:
    here = await rig(loading=True)
    client = await here.connect()
    await client.request("POST", "/api/generate", b'{"model": "chat", "stream": false}')
    await here.model.ready(str(here.engine.path))
    document = json.loads((await client.answer()).body)
    assert (document["done"], document["done_reason"], document["response"]) == (True, "load", "")
    assert here.engine.requests == []


async def test_keep_alive_reaches_the_supervisor_and_zero_loads_nothing(rig: Rigs) -> None:
    here = await rig(loading=True)
    for value in ("10m", -1, 0):
        asked = {"model": "chat", "keep_alive": value, "stream": False}
        if value == 0:
            assert (await post(here, "/api/generate", asked))[1]["done_reason"] == "unload"
        else:
            await here.model.ready(str(here.engine.path))
            assert (await post(here, "/api/chat", asked))[1]["done_reason"] == "load"
    assert here.model.kept_alive == [600.0, -1.0, 0.0]


@pytest.mark.parametrize(("name", "status"), [("chat", 200), ("chat:latest", 200), ("a/b", 200), ("nope", 404)])
async def test_names_with_and_without_latest(rig: Rigs, name: str, status: int) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.json({"choices": [{"message": {"role": "assistant", "content": "yes"}}], "timings": TIMINGS})

    here = await rig(script, config=GatewayOptions(unknown_model="strict"))
    here.model.aliases = ("a/b",)
    found, document = await post(here, "/api/chat", {"model": name, "messages": HELLO, "stream": False})
    assert found == status
    if status == 200:
        assert (document["message"]["content"], document["model"], document["eval_count"]) == ("yes", name, 8)
    else:
        assert "no model 'nope'" in document["error"]
    # Programs that found the model over Ollama's API chat over OpenAI's.
    assert (await post(here, "/v1/chat/completions", {"model": name, "messages": HELLO}))[0] == status
    client = await here.connect()
    await client.request("GET", f"/v1/models/{name}")
    assert (await client.answer()).status == status


async def test_what_editors_look_at_before_they_offer_a_model(rig: Rigs) -> None:
    here = await rig()
    here.model.aliases = ("owner/name",)
    here.model.model_info = {"arch": "qwen3", "n_ctx": 8192, "n_params": 4e9, "capabilities": ["completion", "tools"]}
    version = json.loads((await here.once(b"GET /api/version HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)["version"]
    assert tuple(int(part) for part in version.split(".")) >= (0, 6, 4)
    tags = json.loads((await here.once(b"GET /api/tags HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)["models"]
    assert [each["model"] for each in tags] == ["chat", "owner/name"]
    assert {each["details"]["parameter_size"] for each in tags} == {"4.0B"}
    # `ollama list` and `ollama ps` print the first twelve digits, and end with a panic if there are less.
    assert len({each["digest"] for each in tags}) == 1 and len(bytes.fromhex(tags[0]["digest"])) == 32
    here.model.model_info |= {"size": 900, "size_vram": 600}
    loaded = json.loads((await here.once(b"GET /api/ps HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)["models"]
    assert [(each["size"], each["size_vram"], each["context_length"]) for each in loaded] == [(900, 600, 8192)]
    assert loaded[0]["expires_at"].startswith("2318-"), "never, as Ollama shows it"
    here.context.wall, here.model.left_s = lambda: 1_800_000_000.0, 90.0
    loaded = json.loads((await here.once(b"GET /api/ps HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)["models"]
    assert loaded[0]["expires_at"] == "2027-01-15T08:01:30Z"
    here.model.left_s = 1e300
    loaded = json.loads((await here.once(b"GET /api/ps HTTP/1.1\r\nHost: localhost\r\n\r\n")).body)["models"]
    assert loaded[0]["expires_at"].startswith("2318-"), "later than any date"
    status, shown = await post(here, "/api/show", {"model": "owner/name"})
    assert (status, shown["capabilities"]) == (200, ["completion", "tools"])
    assert (shown["model_info"]["general.architecture"], shown["model_info"]["qwen3.context_length"]) == ("qwen3", 8192)
    assert (await post(here, "/api/show", {"name": "nope"}))[0] == 404


CAN = {"supports_tools": True}
FOUR = ["completion", "tools", "thinking", "vision"]


@pytest.mark.parametrize(
    ("props", "found"),
    [
        (
            {
                "chat_template_caps": {"supports_tools": True},
                "chat_template": "a<think>b",
                "modalities": {"vision": True},
            },
            ["completion", "tools", "thinking", "vision"],
        ),
        ({"chat_template_caps": {"supports_tools": False}, "chat_template": "tools"}, ["completion"]),
        ({"chat_template": "{% if tools %}"}, ["completion", "tools"]),
        ([], ["completion"]),
    ],
)
async def test_capabilities_come_from_the_template(rig: Rigs, props: object, found: list[str]) -> None:
    async def script(line: Line, request: Received) -> None:
        assert request.target == "/props"
        await line.json(props)

    here = await rig(script)
    assert (await post(here, "/api/show", {"model": "chat"}))[1]["capabilities"] == found


@pytest.mark.parametrize("state", [State.SLEEPING, State.LOADING])
@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if tools %}<think>{% endif %}" + " " * 5000, ["completion", "vision", "tools", "thinking"]),
        ("{% if tools %}", ["completion", "vision", "tools"]),
        ("{{ messages }}", ["completion", "vision"]),
        (None, ["completion", "vision"]),
    ],
)
async def test_capabilities_before_ready_come_from_the_header(
    rig: Rigs, tmp_path: Path, state: State, template: str | None, found: list[str]
) -> None:
    """VS Code and Home Assistant ask once, often while the model sleeps, and offer no tools then."""
    gguf = Gguf("llama").model()
    if template is None:
        gguf.drop("tokenizer.chat_template")
    else:
        gguf.set("tokenizer.chat_template", template)
    here = await rig(loading=True)
    here.model.model_info["capabilities"] = ["completion", "vision"]
    here.model.template_file = str(gguf.save(tmp_path / "tiny.gguf"))
    await here.model.lost(state)
    for _ in range(2):  # the second time what the first one found
        assert (await post(here, "/api/show", {"model": "chat"}))[1]["capabilities"] == found
    assert here.model.asked == 0, "it wakes nothing"


@pytest.mark.parametrize("content", [None, b"", b"no GGUF"])
async def test_capabilities_of_a_file_that_cannot_be_read_are_the_plans(
    rig: Rigs, tmp_path: Path, content: bytes | None
) -> None:
    here = await rig(loading=True)
    here.model.template_file = str(tmp_path / "gone.gguf")
    if content is not None:
        (tmp_path / "gone.gguf").write_bytes(content)
    assert (await post(here, "/api/show", {"model": "chat"}))[1]["capabilities"] == ["completion"]
    here.model.model_info["capabilities"] = ["embedding"]
    assert (await post(here, "/api/show", {"model": "chat"}))[1]["capabilities"] == ["embedding"]


@pytest.mark.parametrize("what", ["pull", "create", "copy"])
async def test_what_changes_the_store_is_refused_with_the_command(rig: Rigs, what: str) -> None:
    here = await rig()
    status, document = await post(here, f"/api/{what}", {"model": "other"})
    assert (status, "edgellm" in document["error"]) == (403, True)
    assert await post(here, "/api/pull", {"model": "chat:latest"}) == (200, {"status": "success"})


async def test_several_models_are_found_by_name(rig: Rigs) -> None:
    here = await rig(models={"small": FakeModel("small"), "large": FakeModel("large")})
    status, document = await post(here, "/api/chat", {"model": "chat", "messages": HELLO})
    assert (status, "small, large" in document["error"]) == (404, True)


@pytest.mark.parametrize(
    "last",
    [
        '"usage":{"prompt_tokens":1e400}',
        '"usage":{"prompt_tokens":1.5}',
        '"usage":[]',
        '"timings":{"prompt_ms":null}',
        '"timings":{"prompt_ms":1e400}',
    ],
)
def test_a_bad_figure_costs_no_answer(last: str) -> None:
    call = read_call("/api/chat", b'{"model":"m","messages":[{"role":"user","content":"x"}]}')
    answer = OllamaAnswer(call, time.monotonic, time.time)
    text = answer.feed(b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\ndata: {"choices":[],%s}\n\n' % last.encode())
    lines = (text + answer.feed(b"data: [DONE]\n\n") + answer.close()).splitlines()
    assert not answer.broken and json.loads(lines[-1])["done"] is True


# One event, or the whole answer with `message` in place of `delta`, and what an engine may put in place of any value.
_TOOL = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_SAID = {"role": "assistant", "content": "b", "reasoning_content": "r", "tool_calls": [_TOOL]}
_ANSWER: dict[str, Any] = {
    "choices": [{"index": 0, "finish_reason": "stop", "delta": _SAID}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "timings": TIMINGS,
}
_ODD: list[Any] = [
    None,
    True,
    -1,
    10**400,
    1e308,
    math.nan,
    -math.inf,
    "",
    "x",
    [],
    {},
    [None],
    [[]],
    {"a": None},
    2**63,
    2**64,
    "\ud800",
]


def _mutants(document: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the place and the document with one value replaced, for every place and every odd value."""
    if before:
        yield from ((before, odd) for odd in _ODD)
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        for place, changed in _mutants(value, (*before, key)):
            made: Any = dict(document) if isinstance(document, dict) else list(document)
            made[key] = changed
            yield place, made


def test_no_member_of_another_type_ends_a_stream() -> None:
    call, _ = translated("/api/chat", {"model": "c", "messages": HELLO})
    end = {"choices": [{"finish_reason": "stop", "delta": {}}]}
    for place, event in [*_mutants(_ANSWER), ((), None), ((), 3), ((), [])]:
        found = lines(call, [delta(content="A"), event, delta(content="C"), end, "[DONE]"], cut=1 << 20)
        text = "".join(each["message"]["content"] for each in found)
        assert found[-1]["done"] is True and (text[0], text[-1]) == ("A", "C"), (place, event)
        if place and "content" not in place and place[-1] != "choices" and len(place) > 3:
            assert text == "AbC", "a bad neighbour takes no text away"
            assert "tool_calls" in place or found[-2]["message"]["tool_calls"]


def test_no_member_of_another_type_ends_a_whole_answer() -> None:
    call, _ = translated("/api/chat", {"model": "c", "messages": HELLO, "stream": False})
    whole = {**_ANSWER, "choices": [{"finish_reason": "stop", "message": _SAID}]}
    for place, changed in _mutants(whole):
        found = json.loads(OllamaAnswer(call, float, float).whole(json.dumps(changed).encode()))
        assert found["done"] is True and "content" in found["message"], place
        if place[0] != "choices" or "reasoning_content" in place or "tool_calls" in place:
            assert found["message"]["content"] == "b", place
    for none in ({"error": {"message": "full"}}, None, 3, []):
        with pytest.raises(ValueError):
            OllamaAnswer(call, float, float).whole(json.dumps(none).encode())


def test_arguments_that_are_an_object_reach_the_client() -> None:
    call, _ = translated("/api/chat", {"model": "c", "messages": HELLO})
    tool = {"index": 0, "function": {"name": "add", "arguments": {"a": 1}}}
    first, _ = lines(call, [delta(tool_calls=[tool]), "[DONE]"])
    assert first["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    ("written", "found"), [('{"a":"\\ud83d"}', {"a": "?"}), ('{"a":NaN}', {"a": None}), ('{"a":1', {}), ("[1]", {})]
)
def test_arguments_that_a_model_wrote_badly_end_no_answer(written: str, found: dict[str, Any]) -> None:
    call, _ = translated("/api/chat", {"model": "c", "messages": HELLO})
    tool = {"index": 0, "function": {"name": "add", "arguments": written}}
    first, last = lines(call, [delta(tool_calls=[tool]), "[DONE]"])
    assert first["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": found}}] and last["done"]


def test_vectors_are_all_there_or_none() -> None:
    """One vector less would give each text after it the vector of another."""
    call, _ = translated("/api/embed", {"model": "c", "input": ["a", "b"]})
    good = {"embedding": [1.0]}
    for data in (None, 3, [good, None], [good, {"embedding": None}], [good, {"embedding": [None]}], {"0": good}):
        with pytest.raises(ValueError):
            OllamaAnswer(call, float, float).whole(json.dumps({"data": data}).encode())
