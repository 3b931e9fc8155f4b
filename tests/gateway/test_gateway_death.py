"""What clients see when the engine dies."""

from __future__ import annotations

import asyncio
import json

import pytest

from edge.gateway import connection_pool
from edge.gateway.config import ClientLimits
from edge.supervisor.status import Failure
from tests.fakes.upstream.engine import FakeEngine, Line, Received, Script, answer_ok
from tests.gateway.conftest import Rig, Rigs
from tests.gateway.raw import until

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody"
IMPATIENT = POST.replace(b"Host", b"Edgellm-Max-Wait: 0.2\r\nHost")


class Dies:
    """Cuts the line of the first `times` requests, without a byte."""

    def __init__(self, times: int) -> None:
        self.times = times

    async def __call__(self, line: Line, request: Received) -> None:
        if self.times > 0:
            self.times -= 1
            line.cut()
            await line.gone.wait()
        await line.json({"ok": True, "body_bytes": len(request.body)})


async def test_a_request_is_sent_once_more_to_the_restarted_child(rig: Rigs) -> None:
    async def die(line: Line, request: Received) -> None:
        await here.model.lost()
        await here.engine.stop()

    here = await rig(die)
    client = await here.connect()
    await client.send(POST)
    await until(lambda: here.model.waiting == 1)
    next_child = FakeEngine(here.engine.path.with_name("next.sock"))
    await next_child.start()
    here.stack.push_async_callback(next_child.stop)
    await here.model.ready(str(next_child.path))
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)) == (200, {"ok": True, "body_bytes": 4})
    assert here.context.stats.model("chat").retries == 1


async def test_a_child_that_is_dead_before_its_supervisor_knows_is_waited_for(rig: Rigs) -> None:
    """Its socket refuses at once; that it is no longer READY may be seen seconds later."""

    async def die(line: Line, request: Received) -> None:
        await here.engine.stop()

    here = await rig(die)
    client = await here.connect()
    await client.send(POST)
    await until(lambda: here.model.looks >= 6)
    await here.model.lost()
    await _next_child(here, "next.sock")
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)) == (200, {"ok": True, "body_bytes": 4})
    assert here.context.stats.model("chat").retries == 1


async def test_a_dying_child_that_still_takes_connections_costs_no_retry(rig: Rigs) -> None:
    here = await rig(Dies(10))
    client = await here.connect()
    await client.send(POST)
    await until(lambda: len(here.engine.requests) == 2)
    fresh = await _next_child(here, "next.sock")
    assert (await client.answer()).status == 200
    assert [len(here.engine.requests), len(fresh.requests)] == [2, 1]


async def test_a_request_that_kills_engines_kills_two(rig: Rigs) -> None:
    here = await rig(Dies(10))
    client = await here.connect()
    await client.send(POST)
    await until(lambda: len(here.engine.requests) == 2)
    second = await _next_child(here, "second.sock", Dies(10))
    assert (await client.answer()).status == 502
    assert [len(here.engine.requests), len(second.requests)] == [2, 1]


async def _next_child(here: Rig, name: str, script: Script = answer_ok) -> FakeEngine:
    child = FakeEngine(here.engine.path.with_name(name), script)
    await child.start()
    here.stack.push_async_callback(child.stop)
    await here.model.ready(str(child.path))
    return child


@pytest.mark.parametrize("said", [b"H", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nContent-L", b"no such protocol\r\n\r\n"])
async def test_half_a_head_is_a_byte_and_is_not_asked_for_again(rig: Rigs, said: bytes) -> None:
    async def die(line: Line, request: Received) -> None:
        await line.write(said)
        line.writer.close()

    here = await rig(die)
    answer = await here.once(POST)
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (502, "upstream_died")
    assert len(here.engine.requests) == 1
    stats = here.context.stats.model("chat")
    assert (stats.retries, stats.cut) == (0, 1)


@pytest.mark.parametrize("end", ["failed", "late"])
async def test_a_child_that_does_not_come_back_is_a_502(rig: Rigs, end: str) -> None:
    async def die(line: Line, request: Received) -> None:
        await here.model.lost()
        line.cut()

    here = await rig(die)
    client = await here.connect()
    patience = () if end == "failed" else ("Edgellm-Max-Wait: 0.2",)
    await client.request("POST", "/v1/chat/completions", b"body", *patience)
    await until(lambda: here.model.waiting == 1)
    if end == "failed":
        await here.model.fail("bad_model", "pull it again")
    answer = await client.answer()
    kind = json.loads(answer.body)["error"]["kind"]
    assert (answer.status, kind) == (502, "bad_model" if end == "failed" else "upstream_died")
    assert here.context.admission.active("chat") == 0


async def test_it_is_sent_once_more_and_not_twice(rig: Rigs) -> None:
    here = await rig(Dies(3))
    answer = await here.once(IMPATIENT)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["src"], error["kind"]) == (502, "edgellm", "upstream_died")
    assert error["hint"]
    assert len(here.engine.requests) == 2


async def test_the_502_says_why_when_that_is_known(rig: Rigs) -> None:
    here = await rig(Dies(2))
    here.model.state = type(here.model.state)(
        "chat", here.model.state.state, failure=Failure("out_of_memory", "/var/log: killed", "a smaller context")
    )
    answer = await here.once(IMPATIENT)
    error = json.loads(answer.body)["error"]
    assert (error["kind"], error["hint"]) == ("out_of_memory", "a smaller context")
    assert b"/var/log" not in answer.body


async def test_a_body_that_was_streamed_away_is_not_sent_again(rig: Rigs) -> None:
    async def die(line: Line, request: Received) -> None:
        await line.reader.readexactly(500_000)
        line.cut()

    here = await rig(die, read_body=False)
    client = await here.connect()
    await client.send(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n" + b"x" * 900_000)
    assert (await client.answer()).status == 502
    assert len(here.engine.requests) == 1


async def test_an_answer_that_had_begun_is_not_asked_for_again(rig: Rigs) -> None:
    async def die(line: Line, request: Received) -> None:
        await line.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        line.cut()

    here = await rig(die)
    answer = await here.once(POST)
    assert answer.status == 502
    assert len(here.engine.requests) == 1
    assert here.context.stats.model("chat").cut == 1


async def test_a_stream_that_breaks_ends_with_an_error_event_and_never_looks_complete(rig: Rigs) -> None:
    async def die(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b'data: {"choices":[]}\n\n')
        await asyncio.sleep(0.02)
        line.cut()

    here = await rig(die)
    client = await here.connect()
    await client.send(POST)
    await client.head()
    assert await client.chunk() == b'data: {"choices":[]}\n\n'
    event = await client.chunk()
    error = json.loads(event.partition(b"data: ")[2])["error"]
    assert (error["src"], error["kind"]) == ("edgellm", "upstream_died")
    with pytest.raises(asyncio.IncompleteReadError):
        await client.chunk()  # no terminating chunk: the connection just ends
    await until(lambda: here.context.stats.model("chat").cut == 1)


async def test_an_answer_with_a_length_that_breaks_comes_up_short(rig: Rigs) -> None:
    async def die(line: Line, request: Received) -> None:
        await line.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 1000)
        line.cut()

    here = await rig(die)
    client = await here.connect()
    await client.send(POST)
    await client.head()
    assert len(await client.rest()) <= 1000


async def test_fc91_a_connection_that_the_engine_closed_while_idle_costs_no_request(rig: Rigs) -> None:
    """The engine closes idle connections; the request that meets a closed one is sent again on a fresh one."""
    here = await rig()
    here.engine.idle_s = 0.02
    for number in range(50):
        answer = await here.once(POST)
        assert (answer.status, number) == (200, number)
        await asyncio.sleep(0.02 if number % 2 else 0.03)
    assert len(here.engine.requests) == 50


async def test_fc91_a_closing_race_on_a_kept_connection_is_hidden(rig: Rigs) -> None:
    here = await rig(Dies(0))
    assert (await here.once(POST)).status == 200
    here.engine.script = Dies(1)
    assert (await here.once(POST)).status == 200
    assert [request.connection for request in here.engine.requests] == [0, 0, 1]


async def test_fc91_a_body_that_cannot_be_sent_twice_goes_over_a_fresh_connection(rig: Rigs) -> None:
    here = await rig()
    large = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\n\r\n" + b"x" * 900_000
    for data in (POST, large, POST, large):
        assert (await here.once(data)).status == 200
    assert [request.connection for request in here.engine.requests] == [0, 1, 0, 2]
    await until(lambda: here.engine.open == 1)


def test_fc91_a_kept_connection_is_given_up_before_the_engine_does() -> None:
    assert 0 < connection_pool.KEEP_S <= connection_pool.ENGINE_KEEPS_S - 1
    assert ClientLimits().idle_s >= 90, "nor do we give up a client's before the client does"


async def test_fc94_a_new_child_gets_new_connections_and_the_old_pool_is_gone(rig: Rigs) -> None:
    here = await rig()
    await asyncio.gather(*(here.once(POST) for _ in range(10)))
    old, opened = here.engine, len(here.engine.lines)
    assert opened <= 10
    fresh = FakeEngine(here.engine.path.with_name("fresh.sock"))
    await fresh.start()
    here.stack.push_async_callback(fresh.stop)
    await here.model.ready(str(fresh.path))
    await asyncio.gather(*(here.once(POST) for _ in range(10)))
    assert len(fresh.requests) == 10
    assert len(old.requests) == 10
    await until(lambda: old.open == 0)


async def test_fc94_many_requests_share_few_connections(rig: Rigs) -> None:
    here = await rig()
    for _ in range(20):
        assert all(each.status == 200 for each in await asyncio.gather(*(here.once(POST) for _ in range(8))))
    assert len(here.engine.requests) == 160
    assert len(here.engine.lines) <= 8


async def test_a_stream_of_the_old_child_goes_on_while_the_new_one_serves(rig: Rigs) -> None:
    go = asyncio.Event()

    async def slow(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await go.wait()
        await line.chunk(b"data: 2\n\n")
        await line.end()

    here = await rig(slow)
    client = await here.connect()
    await client.send(POST)
    await client.head()
    assert await client.chunk() == b"data: 1\n\n"
    fresh = FakeEngine(here.engine.path.with_name("fresh.sock"), answer_ok)
    await fresh.start()
    here.stack.push_async_callback(fresh.stop)
    await here.model.ready(str(fresh.path))
    assert (await here.once(POST)).status == 200
    go.set()
    assert await client.chunks() == [b"data: 2\n\n"]


async def test_a_socket_that_is_not_there_yet_is_asked_again(rig: Rigs) -> None:
    """The supervisor says READY, the socket refuses: nothing was sent, so asking again is safe."""
    here = await rig()
    await here.engine.stop()
    client = await here.connect()
    await client.send(POST)
    await until(lambda: here.model.looks >= 6)
    await here.engine.start()
    assert (await client.answer()).status == 200


async def test_a_socket_that_stays_away_is_a_502(rig: Rigs) -> None:
    here = await rig()
    await here.engine.stop()
    assert (await here.once(IMPATIENT)).status == 502
    assert here.context.admission.active("chat") == 0


async def test_fc94_a_burst_keeps_no_more_connections_than_the_engine_has_threads(rig: Rigs) -> None:
    """An idle connection occupies a thread of the engine's; a kept burst would make the next request wait for one."""
    here = await rig()
    here.model.slots = 2
    get = b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert all(each.status == 200 for each in await asyncio.gather(*(here.once(get) for _ in range(30))))
    await until(lambda: here.engine.open <= 4)
    assert len(here.engine.requests) == 30


async def test_a_request_that_killed_two_engines_is_refused_with_422(rig: Rigs) -> None:
    here = await rig(answer_ok)
    assert (await here.once(POST)).status == 200
    (fingerprint,) = here.model.fingerprints
    assert fingerprint is not None
    here.model.refused = {fingerprint}
    answer = await here.once(POST)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["kind"]) == (422, "kills_engine")
    assert len(here.engine.requests) == 1, "no third engine gets it"
    other = POST.replace(b"Content-Length: 4", b"Content-Length: 3")[:-1]
    assert (await here.once(other)).status == 200
