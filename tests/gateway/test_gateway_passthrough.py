"""Byte for byte what the engine says."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json

import pytest

from edge.gateway.config import GatewayOptions
from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rigs


async def _raw(line: Line, request: Received, answer: bytes) -> None:
    await line.write(answer)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, "OK"),
        (201, "Created"),
        (400, "Bad Request"),
        (404, "Not Found"),
        (500, "Internal Server Error"),
        (501, "Nope"),
    ],
)
async def test_status_reason_and_body_pass(rig: Rigs, status: int, text: str) -> None:
    body = b'{"error": {"message" : "exactly  these bytes \xc3\xa9"}}'

    async def script(line: Line, request: Received) -> None:
        head = f"HTTP/1.1 {status} {text}\r\nContent-Type: application/json; charset=utf-8\r\nX-Odd: a, b\r\n"
        await line.write(f"{head}Server: llama.cpp\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    here = await rig(script)
    answer = await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (answer.status, answer.body) == (status, body)
    assert answer.header("content-type") == "application/json; charset=utf-8"
    assert answer.header("server") == "llama.cpp"
    assert answer.header("x-odd") == "a, b"


async def test_fc83_a_stream_passes_in_order_until_done_and_its_usage_is_counted(rig: Rigs) -> None:
    events = [
        b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n',
        b'data: {"choices":[{"finish_reason":"stop","delta":{}}]}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":8,"prompt_tokens":30,"total_tokens":38}}\n\n',
        b"data: [DONE]\n\n",
    ]
    step = asyncio.Semaphore(0)

    async def script(line: Line, request: Received) -> None:
        await line.stream()
        for event in events:
            await step.acquire()
            await line.chunk(event)
        await line.end()

    here = await rig(script)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}")
    seen = []
    for _ in events:
        step.release()  # the next event is not even written before this one has come through
        if not seen:
            assert (await client.head()).header("content-type") == "text/event-stream"
        seen.append(await client.chunk())
    assert seen == events
    assert await client.chunk() == b""
    stats = here.context.stats.model("chat")
    assert (stats.prompt_tokens, stats.completion_tokens) == (30, 8)


async def test_the_first_chunk_does_not_wait_for_the_second(rig: Rigs) -> None:
    """The suite of llama.cpp cannot see a buffered stream; this can."""

    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await line.until_gone()

    here = await rig(script)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}")
    await client.head()
    assert await client.chunk() == b"data: 1\n\n"


async def test_headers_come_before_the_first_chunk(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream("X-Accel-Buffering: no\r\n")
        await line.until_gone()

    here = await rig(script)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}")
    assert (await client.head()).header("x-accel-buffering") == "no"


async def test_the_request_passes_as_it_was_written(rig: Rigs) -> None:
    here = await rig()
    target = "/v1/stream?conv=a%3A%3Ab&path=x%2Fy+z&empty=&u=%C3%A9"
    client = await here.connect()
    await client.request(
        "DELETE",
        target,
        b"\x00\xff bytes",
        "X-Conversation-Id: a::b",
        "X-Twice: 1",
        "X-Twice: 2",
        "Cookie: c=1",
        "Authorization: Bearer sk-no-key",
        "X-Api-Key: k",
        "Connection: keep-alive, X-Hop",
        "X-Hop: 1",
        "Content-Type: a/b",
    )
    assert (await client.answer()).status == 200
    (seen,) = here.engine.requests
    assert (seen.method, seen.target, seen.body) == ("DELETE", target, b"\x00\xff bytes")
    names = [name.lower() for name, _ in seen.headers]
    assert names.count("x-twice") == 2
    assert not {"authorization", "x-api-key", "x-hop", "connection"} & set(names)
    assert (seen.header("x-conversation-id"), seen.header("cookie"), seen.header("content-type")) == (
        "a::b",
        "c=1",
        "a/b",
    )
    assert seen.header("host") == "localhost"


async def test_a_compressed_answer_stays_compressed(rig: Rigs) -> None:
    packed = gzip.compress(b"<html>" * 1000)

    async def script(line: Line, request: Received) -> None:
        head = f'HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\nETag: "1"\r\n\r\n'
        await line.write(head.encode() + packed)

    here = await rig(script)
    answer = await here.once(b"GET /upstream/chat/ HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n")
    assert (answer.body, answer.header("content-encoding")) == (packed, "gzip")
    assert here.engine.requests[0].target == "/"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n",
        b'HTTP/1.1 304 Not Modified\r\nETag: "1"\r\nContent-Length: 5\r\n\r\n',
    ],
)
async def test_an_answer_without_a_body(rig: Rigs, answer: bytes) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.write(answer)

    here = await rig(script)
    client = await here.connect()
    for _ in range(2):  # the connection is in order afterwards
        await client.request("GET", "/v1/stream")
        assert (await client.answer(bodiless=True)).status == int(answer[9:12])


async def test_head_has_the_length_and_no_body(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        assert request.method == "HEAD"
        await line.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1234\r\n\r\n")

    here = await rig(script)
    client = await here.connect()
    for _ in range(2):
        await client.request("HEAD", "/props")
        answer = await client.answer(bodiless=True)
        assert (answer.status, answer.header("content-length")) == (200, "1234")
    await client.request("HEAD", "/healthz")
    assert int((await client.answer(bodiless=True)).header("content-length") or 0) > 20


async def test_options_that_is_no_preflight_passes(rig: Rigs) -> None:
    here = await rig()
    assert (await here.once(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n")).status == 200
    assert here.engine.requests[0].method == "OPTIONS"


async def test_an_answer_that_ends_with_its_connection(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it")
        line.writer.close()

    here = await rig(script)
    answer = await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.body == b"all of it"


async def test_a_client_of_http_1_0_gets_no_chunks(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await line.chunk(b"data: 2\n\n")
        await line.end()

    here = await rig(script)
    client = await here.connect()
    await client.send(b"GET /v1/stream HTTP/1.0\r\n\r\n")
    head = await client.head()
    assert head.header("transfer-encoding") is None
    assert await client.rest() == b"data: 1\n\ndata: 2\n\n"


async def test_fc92_expect_100_continue_is_answered_when_the_body_is_wanted(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(max_body_bytes=1000))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
    wanted = await here.connect()
    await wanted.send(head + b"Content-Length: 4\r\n\r\n")
    assert (await wanted.head()).status == 100
    await wanted.send(b"body")
    assert (await wanted.answer()).status == 200
    assert here.engine.requests[0].body == b"body"
    assert here.engine.requests[0].header("expect") is None
    refused = await here.connect()
    await refused.send(head + b"Content-Length: 4000\r\n\r\n")
    assert (await refused.answer()).status == 413


async def test_fc92_a_chunked_upload_without_a_length(rig: Rigs) -> None:
    here = await rig()
    client = await here.connect()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(40):
        await client.send(b"4000\r\n" + b"y" * 0x4000 + b"\r\n")
    await client.send(b"0\r\n\r\n")
    assert json.loads((await client.answer()).body)["body_bytes"] == 40 * 0x4000


async def test_fc92_a_photo_of_12_megabytes_passes(rig: Rigs) -> None:
    body = hashlib.sha256(b"seed").digest() * 400_000

    async def script(line: Line, request: Received) -> None:
        await line.json({"sha": hashlib.sha256(request.body).hexdigest(), "length": request.header("content-length")})

    here = await rig(script)
    async with here.client.post("/v1/chat/completions", data=io.BytesIO(body)) as answer:
        document = await answer.json()
    assert document == {"sha": hashlib.sha256(body).hexdigest(), "length": str(len(body))}


async def test_a_large_body_reaches_the_engine_before_its_end(rig: Rigs) -> None:
    """It is streamed, not gathered: the engine sees its start while the client still holds its end."""
    begun = asyncio.Event()

    async def script(line: Line, request: Received) -> None:
        size = int(request.header("content-length") or 0)
        await line.reader.readexactly(1000)
        begun.set()
        await line.reader.readexactly(size - 1000)
        await line.json({"ok": True})

    here = await rig(script, read_body=False)
    client = await here.connect()
    await client.send(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + b"z" * 400_000)
    await asyncio.wait_for(begun.wait(), 20)
    await client.send(b"z" * 600_000)
    assert (await client.answer()).status == 200


async def test_fc88_the_engines_own_error_is_passed_on(rig: Rigs) -> None:
    """A template without tool support is the engine's to explain."""
    message = {"error": {"code": 500, "message": "tools param requires --jinja flag", "type": "server_error"}}

    async def script(line: Line, request: Received) -> None:
        await line.json(message, "500 Internal Server Error")

    here = await rig(script)
    async with here.client.post("/v1/chat/completions", json={"tools": []}) as answer:
        assert answer.status == 500
        assert await answer.json() == message


async def test_an_engine_that_answers_before_the_body_is_read(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.json({"error": {"message": "too large"}}, "413 Payload Too Large", "Connection: close\r\n")
        await line.until_gone()

    here = await rig(script, read_body=False)
    client = await here.connect()
    await client.send(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n" + b"z" * 500_000)
    assert (await client.answer()).status == 413


async def test_a_slow_reader_holds_the_engine_back_and_not_our_memory(rig: Rigs) -> None:
    written = 0

    async def script(line: Line, request: Received) -> None:
        nonlocal written
        await line.stream()
        while written < 64_000_000:
            await line.chunk(b"x" * 64_000)
            written += 64_000
        await line.end()

    here = await rig(script)
    client = await here.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.request("POST", "/v1/chat/completions", b"{}")
    last = -1
    while last != written or not written:
        last = written
        await asyncio.sleep(0.2)
    assert written < 20_000_000, "the answer piled up between the engine and a client that does not read"
