"""The client of the engines: framing, answers that are unusual or no HTTP, and which connections are used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from edge.gateway import connection_pool
from edge.gateway.connection_pool import Pools
from edge.supervisor.engine_connection import (
    HEADER_BYTES,
    BadAnswer,
    ConnectFailed,
    EngineConnection,
    Payload,
)
from edge.supervisor.upstream import Endpoint
from tests.fakes.upstream.engine import FakeEngine, Line, Received, Script, answer_ok
from tests.gateway.conftest import Rigs
from tests.gateway.raw import LIMIT_S, until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_a_header_that_is_not_utf_8_reaches_the_engine_byte_for_byte(rig: Rigs) -> None:
    here = await rig()
    assert (
        await here.once(b"GET /slots HTTP/1.1\r\nHost: localhost\r\nX-Name: \xe9\xff \xc3\xa9\r\n\r\n")
    ).status == 200
    assert here.engine.requests[0].header("x-name") == b"\xe9\xff \xc3\xa9".decode("latin-1")


@pytest.fixture
async def engine(sockets: Path) -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(sockets / "engine.sock")
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    made = Pools()
    yield made
    made.close()


def _says(*parts: bytes) -> Script:
    """Return a script that writes these bytes, one part after the other was read."""

    async def script(line: Line, request: Received) -> None:
        for part in parts:
            await line.write(part)

    return script


async def _ask(pools: Pools, engine: FakeEngine, method: str = "GET", body: Payload = None) -> tuple[int, bytes]:
    endpoint = Endpoint(str(engine.path), 1)
    with pools.connection("chat", endpoint, 1) as connection:
        answer = await asyncio.wait_for(connection.request(method, "/x", [], body), LIMIT_S)
        return answer.status, await asyncio.wait_for(answer.read(), LIMIT_S)


def _connections(engine: FakeEngine) -> list[int]:
    return [request.connection for request in engine.requests]


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK, b"{}"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Sum: 1\r\nX-B: 2\r\n\r\n", b"{}"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;ext=1\r\n{}\r\n0\r\n\r\n", b"{}"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
async def test_unusual_answers_are_read_to_their_end(
    pools: Pools, engine: FakeEngine, said: bytes, body: bytes
) -> None:
    for script in (_says(said), _says(*(said[at : at + 1] for at in range(len(said))))):
        engine.script = script
        assert (await _ask(pools, engine))[1] == body
    assert _connections(engine) == [0, 0], "the connection is kept"


async def test_an_answer_to_head_has_no_body_whatever_its_length(pools: Pools, engine: FakeEngine) -> None:
    engine.script = _says(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    assert [await _ask(pools, engine, "HEAD") for _ in range(2)] == [(200, b"")] * 2
    assert _connections(engine) == [0, 0]


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 999999 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * (HEADER_BYTES + 1) + b"\r\n\r\n",
        b"HTTP/1.1 200 \x1b[2J\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n{}",
        b"HTTP/1.1 000 Odd\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    ],
)
async def test_a_head_that_is_no_http_or_too_large_is_a_bad_answer(
    pools: Pools, engine: FakeEngine, said: bytes
) -> None:
    engine.script = _says(said)
    with pytest.raises(BadAnswer):
        await _ask(pools, engine)
    await until(lambda: engine.open == 0)


async def test_an_answer_without_an_end_is_kept_to_its_limit_only(pools: Pools, engine: FakeEngine) -> None:
    engine.script = _says(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 100_000] * 4)
    counted: list[int] = []
    with pools.connection("chat", Endpoint(str(engine.path), 1), 1) as connection:
        answer = await connection.request("GET", "/x", [], None)
        with pytest.raises(BadAnswer, match="more than"):
            await answer.read(300_000, counted.append)
    assert not counted, "what a small answer holds is free"
    await until(lambda: engine.open == 0)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
    ],
)
async def test_a_body_that_breaks_raises_and_never_ends_early(pools: Pools, engine: FakeEngine, said: bytes) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.write(said)
        line.writer.close()

    engine.script = script
    with pytest.raises(aiohttp.ClientError):
        await _ask(pools, engine)


async def test_no_process_behind_the_socket(pools: Pools, sockets: Path) -> None:
    for endpoint in (Endpoint(str(sockets / "none.sock"), 1), Endpoint("", 1, port=1)):
        with pytest.raises(ConnectFailed):
            await EngineConnection(endpoint).request("GET", "/", [], None)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        OK + OK,  # bytes that belong to no request would be the answer to the next one
    ],
)
async def test_a_connection_that_cannot_be_used_again_is_closed(pools: Pools, engine: FakeEngine, said: bytes) -> None:
    engine.script = _says(said)
    assert [await _ask(pools, engine) for _ in range(2)] == [(200, b"{}")] * 2
    assert _connections(engine) == [0, 1]
    await until(lambda: engine.open == 0)


async def test_bytes_that_come_while_it_is_idle_end_a_connection(pools: Pools, engine: FakeEngine) -> None:
    with pools.connection("chat", Endpoint(str(engine.path), 1), 1) as connection:
        answer = await connection.request("GET", "/x", [], None)
        assert await answer.read()
    assert connection.reusable
    await engine.lines[0].write(OK)
    await until(lambda: not connection.reusable)
    assert (await _ask(pools, engine))[1] != b"{}"
    assert _connections(engine) == [0, 1]


async def test_an_answer_that_is_here_but_not_read_ends_its_connection(pools: Pools, engine: FakeEngine) -> None:
    """aiohttp pauses the transport above its buffer's limit: a connection that is kept so would never answer again."""
    engine.script = _says(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 2_000_000)
    with pools.connection("chat", Endpoint(str(engine.path), 1), 1) as connection:
        answer = await connection.request("GET", "/x", [], None)
        await answer.content.readany()
    await until(lambda: engine.open == 0)
    engine.script = answer_ok
    assert (await _ask(pools, engine))[0] == 200
    assert _connections(engine) == [0, 1]


async def test_an_idle_connection_is_given_up_and_a_busy_one_is_not(
    pools: Pools, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "KEEP_S", 0.01)
    with pools.connection("chat", Endpoint(str(engine.path), 1), 1) as connection:
        answer = await connection.request("GET", "/x", [], None)
        for _ in range(2):
            assert (await _ask(pools, engine))[0] == 200
            await until(lambda: engine.open == 1)
        assert await answer.read()
    await until(lambda: engine.open == 0)


async def test_a_refusal_of_an_upload_is_read_before_the_upload_ends(pools: Pools, engine: FakeEngine) -> None:
    more = asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        yield b"a"
        await more.wait()

    engine.read_body = False
    engine.script = _says(b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 2\r\n\r\n{}")
    assert await _ask(pools, engine, "POST", upload()) == (413, b"{}")
    await until(lambda: engine.open == 0)


async def test_an_upload_that_breaks_ends_the_request(pools: Pools, engine: FakeEngine) -> None:
    async def upload() -> AsyncIterator[bytes]:
        yield b"a"
        raise ConnectionResetError

    with pytest.raises(aiohttp.ClientConnectionError):
        await _ask(pools, engine, "POST", upload())
    await until(lambda: len(engine.lines) == 1 and engine.open == 0)
    assert engine.requests == []


async def test_an_upload_of_unknown_length_is_sent_in_chunks(pools: Pools, engine: FakeEngine) -> None:
    assert (await _ask(pools, engine, "POST", _pieces(b"a" * 100_000, b"b")))[0] == 200
    assert engine.requests[0].body == b"a" * 100_000 + b"b"


@pytest.mark.parametrize("name", ["X-Transfer-Encoding", "X-Note: Transfer-Encoding"])
async def test_a_header_that_looks_like_a_framing_frames_nothing(pools: Pools, engine: FakeEngine, name: str) -> None:
    """The rest of a body that was sent in chunks, behind a length, would be the engine's next request."""
    body = b"a" * 70_000 + b"POST /slots/0?action=erase HTTP/1.1\r\nHost: e\r\n\r\n"
    with pools.connection("chat", Endpoint(str(engine.path), 1), 1) as connection:
        pairs = [("Content-Length", str(len(body))), (name, "chunked")]
        answer = await connection.request("POST", "/x", pairs, _pieces(body))
        assert answer.status == 200 and await answer.read()
    assert (await _ask(pools, engine))[0] == 200
    assert [request.body for request in engine.requests] == [body, b""]


async def test_a_connection_whose_request_was_not_read_to_its_end_is_closed(pools: Pools, engine: FakeEngine) -> None:
    engine.read_body = False
    engine.script = _says(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")
    # More than the kernel's buffer of a unix socket, 208 KiB by default.
    assert await _ask(pools, engine, "POST", b"a" * 4_000_000) == (400, b"{}")
    await until(lambda: engine.open == 0)


async def test_an_engine_on_a_port(pools: Pools) -> None:
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        endpoint = Endpoint("", 1, port=server.sockets[0].getsockname()[1])
        with pools.connection("chat", endpoint, 1) as connection:
            assert await (await connection.request("GET", "/x", [], None)).read() == b"{}"
        pools.close()
        await asyncio.wait_for(ended.wait(), LIMIT_S)


async def test_a_request_that_is_cancelled_at_any_moment_leaves_no_connection(pools: Pools, engine: FakeEngine) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.until_gone()

    engine.script = script
    for turns in range(12):
        asked = asyncio.ensure_future(_ask(pools, engine))
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    await until(lambda: engine.open == 0)
