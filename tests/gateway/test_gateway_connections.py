"""Limits of client connections: heads, uploads, peers, and room for probes while all others are taken."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import json
import random
import unittest.mock
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from edge.gateway import admission, connections, headers, turns, waiting_room
from edge.gateway import body as body_module
from edge.gateway.body import _zstd_window_bytes
from edge.gateway.config import ClientLimits, GatewayOptions
from edge.gateway.connections import Connection, Connections
from edge.gateway.openai import HttpFault
from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rig, Rigs
from tests.gateway.raw import Client, until
from tests.gateway.test_gateway_encoding import zstd

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def configured(**limits: float) -> GatewayOptions:
    return GatewayOptions(limits=ClientLimits(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [100, 4096, 10_000_000])
async def test_all_headers_together_are_bounded_however_they_come(rig: Rigs, piece: int) -> None:
    here = await rig()
    client = await here.connect()
    data = HEAD + b"".join(b"X-%d: %s\r\n" % (number, b"y" * 8000) for number in range(5)) + b"\r\n"
    for start in range(0, len(data), piece):
        await client.send(data[start : start + piece])
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (400, "headers_too_large")
    assert here.engine.requests == []
    assert (await here.once(LIVEZ)).status == 200


COOKIES = b"GET %s HTTP/1.1\r\nHost: localhost\r\nCookie: " + b"c" * 15_000 + b"\r\n\r\n"


async def _waits(line: Line, request: Received) -> None:
    await line.until_gone()


async def test_the_heads_of_all_clients_are_bounded_together(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "_ALL_BYTES", 400_000)
    here = await rig(_waits)
    heads, clients = here.context.connections.heads, [await here.connect() for _ in range(30)]
    for client in clients:
        await client.send(COOKIES % b"/slots")
    await until(lambda: heads.kept_bytes > 350_000)
    answer = await here.once(COOKIES % b"/livez")
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "headers_waiting")
    assert heads.kept_bytes <= 400_000
    assert (await here.once(LIVEZ)).status == 200, "a small head needs no room"
    for client in clients:
        client.reset()
    await until(lambda: not heads.kept_bytes)
    assert (await here.once(COOKIES % b"/livez")).status == 200


async def test_a_client_that_pipelines_more_heads_than_there_is_room_for_is_dropped(
    rig: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "_ALL_BYTES", 30_000)
    here = await rig(_waits)
    client = await here.connect()
    await client.send(COOKIES % b"/slots")
    await until(lambda: here.engine.requests)
    await client.send(COOKIES % b"/slots")
    with contextlib.suppress(ConnectionError):
        assert await client.rest() == b""
    await until(lambda: not here.context.connections.heads.kept_bytes)


async def test_a_connection_with_a_large_head_is_kept_only_while_there_is_room(
    rig: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "_ALL_BYTES", 100_000)
    here = await rig()
    clients = [await here.connect() for _ in range(12)]
    kept = 0
    for client in clients:
        await client.send(COOKIES % b"/livez")
        kept += (await client.answer()).header("connection") != "close"
    assert 1 <= kept <= 3
    small = await here.connect()
    for _ in range(3):
        await small.send(LIVEZ)
        assert (await small.answer()).header("connection") != "close"


async def test_each_request_of_a_connection_has_the_whole_limit(rig: Rigs) -> None:
    here = await rig()
    client = await here.connect()
    head = HEAD + b"X: %s\r\n" % (b"y" * 12_000) + b"Y: %s\r\n" % (b"y" * 12_000)
    for body in (b"{}", b"[" + b" " * 60_000 + b"]", b"{}"):
        await client.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await client.answer()).status == 200


async def uploads(here: Rig, count: int) -> list[Client]:
    """Clients whose bodies come and do not end."""
    found = [await here.connect() for _ in range(count)]
    for client in found:
        await client.send(HEAD + b"Content-Length: 100000\r\n\r\n{")
    await until(lambda: sum(each.body_pending for each in here.context.connections._open.values()) == count)
    return found


async def test_probes_are_answered_while_slow_uploads_hold_all_connections(rig: Rigs) -> None:
    here = await rig(config=configured(connections=32))
    await uploads(here, 32)
    for _ in range(5):
        answer = await here.once(LIVEZ)
        assert (answer.status, answer.header("connection")) == (200, "close")
        refused = await here.once(HEAD + b"Content-Length: 2\r\n\r\n{}")
        assert (refused.status, json.loads(refused.body)["error"]["kind"]) == (503, "too_many_connections")


async def test_connections_for_probes_that_send_nothing_give_way_to_a_probe(rig: Rigs) -> None:
    here = await rig(config=configured(connections=32, probe_s=60))
    await uploads(here, 32)
    idle = [await here.connect() for _ in range(2)]
    await until(lambda: len(here.context.connections) == 34)
    await asyncio.sleep(0.3)  # older than their grace
    assert (await here.once(LIVEZ)).status == 200
    assert [await client.rest() for client in idle[:1]] == [b""]


async def test_a_slow_upload_gives_way_where_no_connection_is_idle(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_JUDGED_AFTER_S", 0.05)
    here = await rig(config=configured(connections=8))
    slow = await uploads(here, 8)
    await asyncio.sleep(0.1)
    assert (await here.once(HEAD + b"Content-Length: 2\r\n\r\n{}")).status == 200
    assert len([client for client in slow if client.reader.at_eof() or client.writer.is_closing()]) <= 1
    await until(lambda: len(here.context.connections) <= 8)


async def test_a_refused_client_can_read_why_though_it_has_sent_its_request(rig: Rigs) -> None:
    here = await rig(loading=True, config=configured(connections=1))
    busy = await here.connect()
    await busy.send(HEAD + b"Content-Length: 2\r\n\r\n{}")
    await until(lambda: here.model.waiting == 1)
    for _ in range(20):
        answer = await here.once(HEAD + b"Content-Length: 300000\r\n\r\n" + b"x" * 300_000)
        assert json.loads(answer.body)["error"]["kind"] == "too_many_connections"


async def test_a_rejected_upload_does_not_spoil_the_connections_end(rig: Rigs) -> None:
    """The rest of a body that is not read is no head of another request."""
    here = await rig(config=GatewayOptions(max_body_bytes=1024))
    client = await here.connect()
    await client.send(HEAD + b"Content-Length: 200000\r\n\r\n")
    answer = await client.answer()
    assert answer.status == 413
    for _ in range(20):
        client.writer.write(b"x" * 10_000)
    assert await client.rest() == b""


class Peer:
    """A transport of one client, as far as Connections looks at it."""

    def __init__(self, host: str) -> None:
        self.host = host

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return (self.host, 4711)

    def abort(self) -> None:
        raise AssertionError("nothing has to go")


async def test_one_peer_takes_its_share_and_loopback_all() -> None:
    found = Connections(ClientLimits(connections=100, connections_per_peer=3))

    def join(host: str) -> Peer | None:
        transport = Peer(host)
        connection = connections.Connection(found, asyncio.Protocol())
        return transport if found._join(connection, transport) else None  # type: ignore[arg-type]

    peers = [join("192.168.0.7") for _ in range(4)]
    assert [peer is not None for peer in peers] == [True, True, True, False]
    assert not join("::ffff:192.168.0.7"), "the same peer on a socket of both families"
    assert join("192.168.0.8") and all(join(each) for each in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] * 10)
    found._leave(peers[0])  # type: ignore[arg-type]
    assert join("192.168.0.7")
    for transport in list(found._open):
        found._leave(transport)  # type: ignore[arg-type]
    assert (len(found), found._peers) == (0, {})


async def test_requests_that_take_no_slot_are_bounded_too(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LIGHT_REQUESTS", 3)
    go = asyncio.Event()

    async def slow(line: Line, request: Received) -> None:
        await go.wait()
        await line.json({})

    here = await rig(slow)
    clients = [await here.connect() for _ in range(8)]
    for client in clients:
        await client.request("GET", "/slots")
    await until(lambda: here.context.waiting.tickets == 5)
    await until(lambda: len(here.engine.requests) == 3)
    go.set()
    assert [(await client.answer()).status for client in clients] == [200] * 8


PART = 240_000  # below replay_bytes: it waits for the rest of the body


async def stalled(here: Rig, count: int) -> list[Client]:
    """Clients that have sent a large part of a body, and stop."""
    found = [await here.connect() for _ in range(count)]
    for client in found:
        await client.send(HEAD + b"Content-Length: 1000000\r\n\r\n" + b"{" * PART)
    return found


async def test_bodies_that_are_on_their_way_are_bounded_together(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 of them held 158 MiB. A short chat is served meanwhile; what they held is free when they are gone."""
    monkeypatch.setattr(connections, "_JUDGED_AFTER_S", float("inf"))  # on a slow machine they would count as slow
    here = await rig()
    waiting = here.context.waiting
    fit = waiting_room._ARRIVING_BYTES // (PART - waiting_room._ARRIVING_FREE_BYTES)
    held = await stalled(here, fit)
    await until(lambda: waiting.arriving_bytes >= fit * (PART - waiting_room._ARRIVING_FREE_BYTES))
    for client in await stalled(here, 5):
        answer = await client.answer()
        assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "waiting_room_full")
        assert answer.header("retry-after")
    body = b'{"messages": []}' + b" " * 15_000
    assert (await here.once(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)).status == 200
    for client in held:
        await client.close()
    await until(lambda: waiting.arriving_bytes == 0)
    large = b"[" + b" " * 3_000_000 + b"]"
    assert (await here.once(HEAD + b"Content-Length: %d\r\n\r\n" % len(large) + large)).status == 200
    assert (waiting.arriving_bytes, waiting.held_bytes) == (0, 0)


async def test_a_body_that_crawls_gives_way_to_another(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "_ARRIVING_BYTES", 300_000)
    here = await rig()
    (crawls,) = await stalled(here, 1)
    await until(lambda: here.context.waiting.arriving_bytes > 200_000)
    (crawling,) = here.context.connections._open.values()
    rate = {crawling: 0.0}
    monkeypatch.setattr(Connection, "upload_rate", lambda self, _: rate.get(self, float("inf")))
    body = b"[" + b" " * 200_000 + b"]"
    answers = await here.once(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert answers.status == 200
    with contextlib.suppress(ConnectionError):
        assert await crawls.rest() == b"", "its connection was closed"


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
async def test_compressed_bodies_that_wait_hold_little(rig: Rigs, encoding: str) -> None:
    """8 KiB of zstd unpack to 256 MiB: while a model loads only a part of it is unpacked."""
    here = await rig(loading=True)
    data = {"zstd": zstd.compress, "gzip": gzip.compress}[encoding](b" " * 40_000_000 + b"{}")
    clients = [await here.connect() for _ in range(3)]
    for client in clients:
        head = HEAD + b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (encoding.encode(), len(data))
        await client.send(head + data)
    await until(lambda: here.context.waiting.held_bytes > 3_000_000)
    await until(lambda: here.context.waiting.tickets == 3)
    assert here.context.waiting.held_bytes < 3 * 4_000_000
    await here.model.ready(str(here.engine.path))
    for client in clients:
        assert (await client.answer()).status == 200
    assert [len(request.body) for request in here.engine.requests] == [40_000_002] * 3
    assert here.context.waiting.held_bytes == 0


async def test_bodies_that_are_unpacked_while_they_are_sent_are_bounded(rig: Rigs) -> None:
    """512 of them, each with a window of 8 MiB, on a route without slots: 4 GiB."""

    async def silent(line: Line, request: Received) -> None:
        await line.until_gone()

    here = await rig(silent, read_body=False, config=GatewayOptions(hold_bytes=20_000_000))
    options = {zstd.CompressionParameter.window_log: 23, zstd.CompressionParameter.content_size_flag: 0}
    data = zstd.compress(random.Random(1).randbytes(900_000) + bytes(8_000_000), options=options)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: zstd\r\n"
    for _ in range(2):
        client = await here.connect()
        await client.send(head + b"Content-Length: %d\r\n\r\n" % len(data) + data[:400_000])
    await until(lambda: here.context.waiting.held_bytes >= 16_000_000)
    refused = await here.once(head + b"Content-Length: %d\r\n\r\n" % len(data) + data[:400_000])
    assert (refused.status, json.loads(refused.body)["error"]["kind"]) == (503, "waiting_room_full")
    plain = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + b" " * 400_000
    client = await here.connect()
    await client.send(plain)
    await until(lambda: here.context.stats.model("chat").in_flight == 3)


async def test_what_the_decoder_may_hold_is_given_back_once_the_body_is_sent(rig: Rigs) -> None:
    answering = asyncio.Event()

    async def slow(line: Line, request: Received) -> None:
        await answering.wait()
        await line.json({})

    here = await rig(slow, config=GatewayOptions(hold_bytes=20_000_000))
    options = {zstd.CompressionParameter.window_log: 23, zstd.CompressionParameter.content_size_flag: 0}
    text = random.Random(1).randbytes(300_000) + bytes(8_000_000)
    data = zstd.compress(text, options=options)
    clients = [await here.connect() for _ in range(4)]
    for number, client in enumerate(clients):  # more than have room at a time
        await client.send(HEAD + b"Content-Encoding: zstd\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await until(lambda number=number: len(here.engine.requests) == number + 1)  # type: ignore[misc]
        await until(lambda: here.context.waiting.held_bytes < 8_000_000)
    answering.set()
    assert [(await client.answer()).status for client in clients] == [200] * 4
    assert [request.body == text for request in here.engine.requests] == [True] * 4
    assert here.context.waiting.held_bytes == 0


async def test_a_client_that_was_not_read_from_is_not_slow(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed body is read in part while its model loads, here for an hour."""
    waited_s = [0.0]

    class Later:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        def get_running_loop(self) -> Any:
            return SimpleNamespace(time=lambda: asyncio.get_running_loop().time() + waited_s[0])

    monkeypatch.setattr(body_module, "asyncio", Later())
    here = await rig(loading=True)
    text = random.Random(1).randbytes(6_000_000)
    data = zstd.compress(text)
    client = await here.connect()
    client.writer.write(HEAD + b"Content-Encoding: zstd\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    await until(lambda: here.context.waiting.held_bytes > 1_000_000)
    await until(lambda: not any(each.body_pending for each in here.context.connections._open.values()))
    waited_s[0] = 3600.0
    await here.model.ready(str(here.engine.path))
    assert (await client.answer()).status == 200
    assert here.engine.requests[0].body == text


def test_the_window_of_a_zstd_frame_is_read_from_its_header() -> None:
    text = bytes(range(256)) * 40_000
    for log in (10, 17, 21, 23):
        options = {zstd.CompressionParameter.window_log: log, zstd.CompressionParameter.content_size_flag: 0}
        assert _zstd_window_bytes(zstd.compress(text, options=options)) == 1 << log
    for size in (100, 300, 70_000):
        assert _zstd_window_bytes(zstd.compress(text[:size]) + b" " * 14) == size
    assert _zstd_window_bytes(b"") == _zstd_window_bytes(b"\x50\x2a\x4d\x18" + b" " * 20) == 8 << 20, "unknown"


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every iteration of the event loop has done enough for clients: what is read waits for the next one."""
    monkeypatch.setattr(turns, "TURN_S", -1.0)
    monkeypatch.setattr(turns, "_AT_ONCE_BYTES", 0)


async def test_what_waits_for_its_turn_arrives_whole_and_in_order(rig: Rigs, busy: None) -> None:
    here = await rig()
    text = random.Random(1).randbytes(3_000_000)
    clients = [await here.connect() for _ in range(3)]
    for client in clients:
        client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text)
    assert [(await client.answer()).status for client in clients] == [200] * 3
    assert [request.body == text for request in here.engine.requests] == [True] * 3


async def test_a_head_that_waits_for_its_turn_is_counted_once(rig: Rigs, busy: None) -> None:
    here = await rig()
    client = await here.connect()
    await client.send(HEAD + b"X: %s\r\nY: %s" % (b"y" * 14_000, b"y" * 10_000))
    await until(lambda: any(each._head_bytes for each in here.context.connections._open.values()))
    await client.send(b"y" * 4_000 + b"\r\nContent-Length: 2\r\n\r\n{}")
    answer = await client.answer()
    assert answer.status == 200, answer.body


async def test_a_large_first_head_reaches_aiohttp_once_it_is_complete(rig: Rigs) -> None:
    here = await rig()
    client = await here.connect()
    values = [bytes([97 + number]) * 14_000 for number in range(2)]
    head = HEAD + b"".join(b"X-%d: %s\r\n" % pair for pair in enumerate(values)) + b"Content-Length: 2\r\n\r\n"
    await client.send(head[:-3])
    await until(lambda: any(each._head_bytes == len(head) - 3 for each in here.context.connections._open.values()))
    connection = next(iter(here.context.connections._open.values()))
    held = sum(map(len, connection._held))
    assert held >= len(head) - 3 - connections._OPEN_HEAD_BYTES
    await client.send(head[-3:] + b"{}" + HEAD + b"X: %s\r\n" % values[0])  # the second head is not held
    assert (await client.answer()).status == 200
    await client.send(b"Content-Length: 2\r\n\r\n[]")
    assert (await client.answer()).status == 200
    assert here.engine.requests[0].header("X-0") == values[0].decode()
    assert [request.body for request in here.engine.requests] == [b"{}", b"[]"]
    assert not connection._held


async def test_nothing_is_read_while_what_was_read_before_waits(busy: None) -> None:
    """aiohttp resumes the transport with each part of a body that it passes on: each added a read to what waited."""

    class Inner(asyncio.Protocol):
        seen = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.seen += len(data)
            asyncio.get_running_loop().call_soon(self.transport.resume_reading)

    inners: list[Inner] = []
    waiting: list[bool] = []  # at each read

    class Watched(Connection):
        def __init__(self) -> None:
            inners.append(Inner())
            super().__init__(ours, inners[-1])

        def data_received(self, data: bytes) -> None:
            waiting.append(bool(self._reads._waiting))
            super().data_received(data)

    ours, size = Connections(ClientLimits(header_bytes=10**9)), 1_000_000
    listener = await asyncio.get_running_loop().create_server(Watched, "127.0.0.1", 0)
    writers = [(await asyncio.open_connection(*listener.sockets[0].getsockname()))[1] for _ in range(3)]
    for writer in writers:  # in an iteration one of them has its turn
        writer.write(b"\r\n\r\n" + b"x" * (size - 4))
    await until(lambda: sum(inner.seen for inner in inners) == 3 * size)
    assert len(waiting) >= 3 * size // turns.ONE_READ_BYTES
    assert not any(waiting), f"{sum(waiting)} of {len(waiting)}"
    for writer in writers:
        writer.close()
    await until(lambda: not len(ours))
    assert not any("resume_reading" in vars(inner.transport) for inner in inners), "it refers to the connection"
    listener.close()


async def test_less_is_read_at_once_of_many_connections(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MANY", 0)
    here = await rig()
    await here.connect()

    async def bounds(count: int) -> list[int]:
        await until(lambda: len(here.context.connections) == count)
        return [transport.max_size for transport in here.context.connections._open]  # type: ignore[attr-defined]

    assert await bounds(1) == [turns.ONE_READ_BYTES]
    client = await here.connect()
    assert await bounds(2) == [turns.ONE_READ_BYTES, turns._FEW_BYTES]
    monkeypatch.setattr(turns, "_MANY", 2)
    await client.send(HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * 100_000)
    assert (await client.answer()).status == 200
    assert await bounds(2) == [turns.ONE_READ_BYTES, turns.ONE_READ_BYTES]


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=400), st.integers(1, 3000), st.booleans())
def test_any_chunks_are_joined_to_the_same_body(chunks: list[bytes], piece: int, slow: bool) -> None:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def play() -> bytes:
        seen, most = b"", 0

        async def handle(request: web.BaseRequest) -> web.Response:
            nonlocal seen, most
            body_module.join_chunks(cast(web.Request, request))
            assert type(request.content) is body_module.JoinedChunks
            while part := await request.content.readany():
                seen += part
                most = max(most, len(request.content._buffer))
                if slow:
                    await asyncio.sleep(0)
            return web.Response()

        server = web.Server(handle, read_bufsize=4096)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        for start in range(0, len(framed), piece):
            writer.write((head if not start else b"") + framed[start : start + piece])
            await asyncio.sleep(0)
        assert b"200" in await reader.readline()
        assert most <= body_module._MOST_CHUNKS
        writer.close()
        await server.shutdown(1)
        listener.close()
        return seen

    assert asyncio.run(play()) == b"".join(chunks)


async def test_pipelined_requests_are_answered_in_order_and_leave_probes_their_turn(rig: Rigs) -> None:
    here = await rig()
    count = 500
    asked = b"".join(b"GET /v1/models/m%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number for number in range(count))
    clients = [await here.connect() for _ in range(4)]
    for client in clients:
        client.writer.write(asked)
    assert (await here.once(LIVEZ)).status == 200
    for client in clients:
        answers = [await client.answer() for _ in range(count)]
        assert [f"m{number}" in answer.body.decode() for number, answer in enumerate(answers)] == [True] * count
        await client.close()
    assert not here.context.connections.turns._requests


async def test_requests_that_are_pipelined_after_an_upload_are_answered(rig: Rigs) -> None:
    """A body that came after its head: aiohttp's parser stopped one message early from then on."""
    here = await rig()
    client = await here.connect()
    for count in range(1, 6):
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        await until(lambda: any(each.busy for each in here.context.connections._open.values()))
        await client.send(b"{}")
        assert (await client.answer()).status == 200
        await client.send(LIVEZ * count)
        assert [(await client.answer()).status for _ in range(count)] == [200] * count


async def test_a_client_that_is_gone_before_its_rejection_is_dropped(
    rig: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shutdown(2) of a connection that was reset: ENOTCONN."""
    here = await rig()
    gone = unittest.mock.Mock(spec=asyncio.Transport)
    gone.write_eof.side_effect = OSError(errno.ENOTCONN, "not connected")
    connection = Connection(here.context.connections, unittest.mock.Mock())
    connection._transport = gone
    connection._reject(HttpFault(503, "too_many_connections", "", None))
    gone.abort.assert_called_once_with()
    assert here.context.connections.lingering == 0


async def test_too_many_headers_are_named(rig: Rigs) -> None:
    here = await rig()
    for count, status in ((headers.MOST_HEADERS - 1, 200), (headers.MOST_HEADERS + 1, 400)):
        lines = b"".join(b"X-%d: 1\r\n" % number for number in range(count))
        answer = await here.once(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
        assert answer.status == status
    assert json.loads(answer.body)["error"]["kind"] == "headers_too_large"


def test_a_pipelined_head_is_counted_to_its_end() -> None:
    everyone = headers.AllHeads()
    heads = headers.KeptHeads(everyone)
    heads.add(b"x" * 100)
    heads.answered()
    for _ in range(2):
        heads.add(b"x" * 100, pipelined=True)
        heads.answered()
    heads.add(b"x" * 30_000, pipelined=True)
    heads.answered()
    heads.add(b"x")
    assert everyone.kept_bytes > 50_000


async def test_one_that_leaves_while_it_waits_for_its_turn_is_gone(rig: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.Turns, "_next", lambda _: None)
    here = await rig()
    client = await here.connect()
    client.writer.write(LIVEZ * 3)
    assert (await client.answer()).status == 200, "the first of them waits for no turn"
    await until(lambda: len(here.context.connections.turns._requests) == 1)
    client.reset()
    await until(lambda: len(here.context.connections) == 0)
    assert (await here.once(LIVEZ)).status == 200


@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=8), st.integers(0, 100_000))
def test_any_cuts_of_what_is_read_reach_aiohttp_as_they_came(cuts: list[int], size: int) -> None:
    """Turns that are over at random: nothing is lost, doubled or reordered."""
    data = b"\r\n\r\n" + random.Random(size).randbytes(size)  # the end of a head

    class Inner(asyncio.Protocol):
        def __init__(self) -> None:
            self.seen = b""

        def data_received(self, data: bytes) -> None:
            self.seen += data

    async def play() -> bytes:
        inner = Inner()
        ours = Connections(ClientLimits(header_bytes=10**9))
        listener = await asyncio.get_running_loop().create_server(ours.protocol(lambda: inner), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        at = 0
        for number, cut in enumerate(cuts):
            ours.turns.is_over = lambda over=number % 2 == 0: over  # type: ignore[method-assign]
            writer.write(data[at : at + cut])
            at += cut
            await asyncio.sleep(0)
        writer.write(data[at:])
        await until(lambda: len(inner.seen) >= len(data))
        writer.close()
        listener.close()
        return inner.seen

    assert asyncio.run(play()) == data
