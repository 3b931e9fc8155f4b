"""Rude clients: they get their code, and the others are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import tracemalloc
from typing import cast

import pytest

from edge.gateway import dispatch
from edge.gateway.config import ClientLimits, GatewayOptions
from edge.gateway.connections import Connection, Connections
from edge.linux import sockets
from edge.linux.sockets import AT_ONCE
from edge.units import MIB
from tests.fakes.upstream.engine import Line, Received
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rig, Rigs
from tests.gateway.raw import LIMIT_S, until

OK = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


async def test_a_slowloris_of_200_sockets_is_dropped_and_others_are_served(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(limits=ClientLimits(header_s=1.0)))
    slow = [await here.connect() for _ in range(200)]
    for number, client in enumerate(slow):
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-%d: " % number)
    for _ in range(20):
        assert (await here.once(OK)).status == 200
    dropped = await asyncio.gather(*(client.rest() for client in slow), return_exceptions=True)
    assert all(each == b"" or isinstance(each, ConnectionError) for each in dropped)
    await until(lambda: len(here.context.connections) == 0)


async def test_more_sockets_than_are_allowed_end_the_idle_ones_first(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(limits=ClientLimits(connections=20, grace_s=0)))
    idle = [await here.connect() for _ in range(60)]
    await until(lambda: len(here.context.connections) == 20)
    for _ in range(5):
        assert (await here.once(OK)).status == 200
    assert len(here.context.connections) <= 20
    for client in idle[:30]:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.request("GET", "/livez")
            await client.head()


async def test_who_waited_behind_the_socket_is_served_among_hundreds_who_gave_up() -> None:
    """systemd's socket holds them all while we start, or hang: the first to come, and the last."""

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    def ask() -> socket.socket:
        client = socket.create_connection(listener.getsockname())
        client.sendall(b"here")
        client.setblocking(False)
        return client

    loop = asyncio.get_running_loop()
    connections = Connections(ClientLimits(connections=200))
    (listener,) = sockets.bind(["127.0.0.1:0"])
    first = ask()
    for _ in range(500):
        socket.create_connection(listener.getsockname()).close()
    last = ask()
    server = await loop.create_server(connections.protocol(Echo), sock=listener, backlog=AT_ONCE)
    for client in (first, last):
        with client:
            assert await asyncio.wait_for(loop.sock_recv(client, 10), 20) == b"here"
    server.close()
    await until(lambda: len(connections) == 0)
    assert connections.refused == 0


async def test_a_connection_too_many_is_told_so_when_all_are_busy(rig: Rigs) -> None:
    here = await rig(loading=True, config=GatewayOptions(limits=ClientLimits(connections=3)))
    for number in range(3):
        busy = await here.connect()
        await busy.send(OK)
        await until(lambda number=number: here.model.waiting == number + 1)
    refused = await (await here.connect()).answer()
    assert (refused.status, json.loads(refused.body)["error"]["kind"]) == (503, "too_many_connections")
    assert here.context.connections.refused == 1


def test_a_connection_may_rest_but_not_dawdle() -> None:
    limits = ClientLimits(header_s=20, idle_s=120)
    connection = Connection(Connections(limits), asyncio.Protocol())
    connection.idle_from(100.0)
    assert not connection.overdue(219.0, limits) and connection.overdue(221.0, limits)
    connection._first_byte_s = 100.0
    assert not connection.overdue(119.0, limits) and connection.overdue(121.0, limits)
    connection.busy = True
    assert not connection.overdue(10_000.0, limits)


async def test_a_client_that_takes_nothing_of_its_answer_gives_its_slot_back(rig: Rigs) -> None:
    async def flood(line: Line, request: Received) -> None:
        if request.target.endswith("fast"):
            await line.json({})
            return
        await line.stream()
        while not line.gone.is_set():
            await line.chunk(b"x" * 60_000)

    here = await rig(flood, config=GatewayOptions(limits=ClientLimits(stall_s=0.5)))
    here.model.slots = 1
    client = await here.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.context.admission.active("chat") == 1)
    assert (await here.once(OK.replace(b"completions", b"completions?fast"))).status == 200
    await until(lambda: here.engine.open <= 1)
    await until(lambda: here.context.stats.model("chat").gone == 1)


async def test_fc92_a_body_of_200_megabytes_is_refused_by_its_length(rig: Rigs) -> None:
    here = await rig()
    client = await here.connect()
    await client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000000\r\n\r\n" + b"x" * 100_000
    )
    answer = await client.answer()
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["kind"]) == (413, "body_too_large")
    assert "64.0 MiB" in error["message"] and "max_body_bytes" in error["hint"]
    assert here.engine.requests == []


async def test_fc92_a_body_without_a_length_is_cut_at_the_limit(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(max_body_bytes=1 * MIB))
    client = await here.connect()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(40):
        await client.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    assert (await client.answer()).status == 413
    await until(lambda: here.engine.open == 0)
    assert (await here.once(OK)).status == 200


async def _two_models(rig: Rigs) -> Rig:
    """The name in the body matters, so that the body is looked at."""
    models = {"small": FakeModel("small"), "large": FakeModel("large")}
    here = await rig(models=models)
    await models["small"].ready(str(here.engine.path))
    return here


async def test_fc92_a_body_full_of_objects_costs_its_bytes_and_not_its_objects(rig: Rigs) -> None:
    here = await _two_models(rig)
    body = b'{"pad":[' + b"[]," * 2_600_000 + b'1],"model":"small"}'
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b'{"model":"small"}')
    await client.answer()
    tracemalloc.start()
    try:
        await client.request("POST", "/v1/chat/completions", body)
        assert json.loads((await client.answer()).body)["body_bytes"] == len(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Our client's, ours and the fake engine's copies of it, some twice for a moment; its lists would be 170 MB more.
    assert peak < 8 * len(body)


async def test_fc92_others_are_served_while_a_large_body_is_looked_through(
    rig: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await _two_models(rig)
    others_served, looking = threading.Event(), threading.Event()

    def slow(body: bytes | None, content_type: str, target: str) -> str | None:
        if body is not None and len(body) > MIB:
            looking.set()
            assert others_served.wait(LIMIT_S), "no other client was served meanwhile"
        return named_model(body, content_type, target)

    named_model = dispatch.named_model
    monkeypatch.setattr(dispatch, "named_model", slow)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b'{"pad":"' + b"x" * 2 * MIB + b'","model":"small"}')
    await until(looking.is_set)
    assert (await here.once(OK.replace(b" 2\r", b" 17\r").replace(b"{}", b'{"model":"small"}'))).status == 200
    others_served.set()
    assert (await client.answer()).status == 200


async def test_fc92_a_slow_sender_is_told_so(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(limits=ClientLimits(body_idle_s=0.1)))
    client = await here.connect()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\nx")
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (408, "body_too_slow")


async def test_fc92_a_sender_of_drops_is_told_so(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(limits=ClientLimits(body_idle_s=0.4, body_bytes_per_s=1000)))
    client = await here.connect()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
    answered = asyncio.ensure_future(client.answer())
    while not answered.done():
        client.writer.write(b"x")
        await asyncio.sleep(0.05)
    assert (await answered).status == 408


async def test_a_slow_upload_through_to_the_engine_ends_there_too(rig: Rigs) -> None:
    async def script(line, request):  # type: ignore[no-untyped-def]
        await line.until_gone()

    here = await rig(
        script, read_body=False, config=GatewayOptions(limits=ClientLimits(body_idle_s=0.2, replay_bytes=10))
    )
    client = await here.connect()
    await client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b"x" * 5000
    )
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (408, "body_too_slow")
    await until(lambda: here.engine.open == 0)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nBad Header\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: nan\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_a_400_and_reaches_nobody(
    rig: Rigs, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    here = await rig()
    client = await here.connect()
    client.writer.write(request_bytes)
    # Of a request that is still being sent the answer's end may be lost with the connection's reset.
    answer = await (client.head() if len(request_bytes) > 200_000 else client.answer())
    assert (answer.status, answer.header("server")) == (400, "edgellm")
    if answer.body:
        assert json.loads(answer.body)["error"]["kind"] in ("bad_request", "headers_too_large")
    assert here.engine.requests == []
    assert "Traceback" not in caplog.text and not any(record.exc_info for record in caplog.records)
    assert (await here.once(OK)).status == 200


@pytest.mark.parametrize(
    ("version", "coding", "code"),
    [
        (1, b"gzip, chunked", 501),
        (1, b"GZIP ,Chunked", 501),
        (1, b"identity,chunked", 501),
        (1, b", chunked", 501),
        (1, b"chunked", 200),
        (1, b" Chunked ", 200),
        (0, b"chunked", 400),
        (0, b"gzip, chunked", 400),
    ],
)
async def test_a_transfer_coding_that_is_not_undone_here_is_refused(
    rig: Rigs, version: int, coding: bytes, code: int
) -> None:
    """The engine would get the packed body: a coding is a property of the connection (RFC 9112 6.1)."""
    here = await rig()
    client = await here.connect()
    head = b"POST /v1/chat/completions HTTP/1.%d\r\nHost: localhost\r\nConnection: keep-alive\r\n" % version
    await client.send(head + b"Transfer-Encoding: " + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, len(here.engine.requests)) == (code, code == 200)
    if code != 200:
        assert json.loads(answer.body)["error"]["kind"] == ("transfer_coding" if code == 501 else "bad_request")
        assert await client.rest() == b"", "the end of such a body is not sure: no other request follows it"


@pytest.mark.parametrize("target", [b"/\xff\xfe", b"/%ff", b"/a%00", b"/%", b"/" + b"%2e" * 3000])
async def test_odd_paths_get_a_code(rig: Rigs, target: bytes) -> None:
    here = await rig()
    answer = await here.once(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.status in (200, 400, 404)


@pytest.mark.parametrize(
    ("method", "target"),
    [("OPTIONS", "*"), ("CONNECT", "localhost:22"), ("GET", "/%0a"), ("GET", "/v1/models%0A"), ("POST", "/a%0d%0ab")],
)
async def test_a_target_that_is_no_path_is_rejected_in_the_envelope_and_counted(
    rig: Rigs, method: str, target: str
) -> None:
    here = await rig()
    answer = await here.once(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nExpect: x\r\n\r\n".encode())
    assert (answer.status, answer.header("server")) == (400, "edgellm")
    assert json.loads(answer.body)["error"]["kind"] == "bad_path"
    assert here.engine.requests == [] and (await here.once(OK)).status == 200
    counted = (await here.once(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")).body.decode()
    assert 'route="bad"' in counted


@pytest.mark.parametrize("rest", [b"zz\r\n", b"-1\r\n", b"2\r\n{}X\r\n", b"0\r\n" + b"X: y\r\n" * 200 + b"\r\n"])
@pytest.mark.parametrize("replay_bytes", [0, 1000])
async def test_a_body_whose_chunks_break_is_rejected_at_once(
    rig: Rigs, rest: bytes, replay_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`replay_bytes` 0: on its way to the engine already."""

    async def script(line, request):  # type: ignore[no-untyped-def]
        await line.until_gone()

    limits = ClientLimits(body_idle_s=3600, stall_s=3600, replay_bytes=replay_bytes)
    here = await rig(script, read_body=False, config=GatewayOptions(limits=limits))
    client = await here.connect()
    await client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Expect: 100-continue\r\n\r\n"
    )
    assert (await client.head()).status == 100  # the handler reads the body
    await client.send(b"3\r\n{  \r\n")
    await client.send(rest)
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (400, "bad_request")
    await until(lambda: here.engine.open == 0 and len(here.context.connections) == 0)
    assert not [each for each in caplog.records if each.exc_info], "a client makes the gateway log tracebacks"


async def test_headers_that_are_no_utf8_pass_or_are_refused_but_break_nothing(rig: Rigs) -> None:
    here = await rig()
    for header in (b"Authorization: Bearer \xff\xfe", b"Host: \xff", b"Origin: \xff", b"X: \xe4"):
        answer = await here.once(
            b"GET /props HTTP/1.1\r\n"
            + (b"" if header.startswith(b"Host") else b"Host: localhost\r\n")
            + header
            + b"\r\n\r\n"
        )
        assert answer.status in (200, 400, 403)
    assert (await here.once(OK)).status == 200


async def test_pipelined_requests_are_answered_in_order(rig: Rigs) -> None:
    here = await rig()
    client = await here.connect()
    await client.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3 + OK)
    statuses = [(await client.answer()).status for _ in range(4)]
    assert statuses == [200] * 4


async def test_many_early_cancels_leave_nothing_behind(rig: Rigs) -> None:
    """The short form of the benchmark's 10 000: no connection, no task, no descriptor stays."""

    async def script(line, request):  # type: ignore[no-untyped-def]
        if request.target.endswith("slow"):
            await line.until_gone()
        else:
            await line.json({"ok": True})

    here = await rig(script)
    here.model.slots = 16
    await here.once(OK)
    descriptors, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())  # noqa: PTH208

    async def one(number: int) -> None:
        client = await here.connect()
        await client.request("POST", "/v1/chat/completions?" + ("slow" if number % 3 == 0 else "fast"), b"{}")
        if number % 3 == 0:
            await asyncio.sleep(0.001 * (number % 7))
            client.reset()
        else:
            assert (await client.answer()).status == 200
        await client.close()

    for start in range(0, 300, 15):
        await asyncio.gather(*(one(number) for number in range(start, start + 15)))
    await until(lambda: len(here.context.connections) == 0 and here.context.admission.active("chat") == 0)
    await until(lambda: here.engine.open <= 16)
    for line in here.engine.lines:
        line.cut()
    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)  # noqa: PTH208
    assert here.model.open == 0
