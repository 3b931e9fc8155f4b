"""The waiting room."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from msgspec.structs import replace

from edge.gateway.config import GatewayOptions
from edge.supervisor.status import Degraded, State
from tests.fakes.upstream.engine import Line, Received
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rigs
from tests.gateway.raw import Client, until

ASK = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


async def test_early_requests_are_answered_in_the_order_they_came(rig: Rigs) -> None:
    here = await rig(loading=True)
    here.model.slots = 1
    clients = []
    for number in range(12):  # more than slots and queue together: a request that waited for the model is not rejected
        client = await here.connect()
        await client.request("POST", f"/v1/chat/completions?n={number}", b"x" * number)
        await until(lambda number=number: here.model.waiting == number + 1)
        clients.append(client)
    await here.model.ready(str(here.engine.path))
    answers = [await client.answer() for client in clients]
    assert [answer.status for answer in answers] == [200] * 12
    assert [json.loads(answer.body)["body_bytes"] for answer in answers] == list(range(12))
    assert [request.target.partition("=")[2] for request in here.engine.requests] == [str(n) for n in range(12)]


@pytest.mark.parametrize("how", ["leave", "reset", "half_close"])
async def test_fc38_who_leaves_while_waiting_leaves_at_once(rig: Rigs, how: str) -> None:
    here = await rig(loading=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"x" * 500_000)  # more than is read without being asked for
    await until(lambda: here.model.waiting == 1)
    getattr(client, how)()
    await until(lambda: here.model.waiting == 0)
    await here.model.ready(str(here.engine.path))
    assert (await here.once(ASK + b"Content-Length: 2\r\n\r\n{}")).status == 200
    assert len(here.engine.requests) == 1, "the request of the client that left was sent after all"


async def test_a_request_that_is_one_too_many_is_told_when_to_come_back(rig: Rigs) -> None:
    here = await rig(loading=True, config=GatewayOptions(hold_requests=2))
    here.model.expected_s = 41.5
    waiting = []
    for number in range(2):
        client = await here.connect()
        await client.request("GET", "/props")
        await until(lambda number=number: here.model.waiting == number + 1)
        waiting.append(client)
    refused = await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (refused.status, refused.header("retry-after")) == (503, "42")
    assert json.loads(refused.body)["error"]["kind"] == "waiting_room_full"
    waiting[0].leave()
    await until(lambda: here.model.waiting == 1)
    third = await here.connect()
    await third.request("GET", "/props")
    await until(lambda: here.model.waiting == 2)


async def test_a_new_request_waits_while_another_model_has_its_turn_though_the_engine_is_ready(rig: Rigs) -> None:
    here = await rig()
    here.model.held = True
    client = await here.connect()
    assert (await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")).status == 200, "it wakes no engine"
    before = len(here.engine.requests)
    await client.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.model.waiting == 1)
    assert len(here.engine.requests) == before
    await here.model.release()
    assert (await client.answer()).status == 200
    assert here.model.asked == 1
    assert (await here.once(ASK + b"Content-Length: 2\r\n\r\n{}")).status == 200
    assert here.model.asked == 1, "without a hold a READY engine is not asked for"


async def test_a_request_that_uploads_past_its_models_turn_asks_for_its_memory_again(rig: Rigs) -> None:
    """Its engine slept meanwhile, and the memory is another model's: the request must not wake it."""
    here = await rig()
    here.model.held = True
    client, half = await here.connect(), 400_000  # more than is read before the model is chosen
    await client.send(ASK + b"Content-Length: %d\r\n\r\n" % (2 * half) + b"x" * half)
    await until(lambda: here.model.waiting == 1)
    await here.model.release()
    await until(lambda: here.context.admission.active("chat") == 1)
    here.model.held = True
    await client.send(b"x" * half)
    await until(lambda: here.model.waiting == 1)
    assert here.model.asked == 2 and here.engine.requests == []
    await here.model.release()
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["body_bytes"]) == (200, 2 * half)


async def test_a_preload_of_an_engine_that_is_there_asks_for_nothing(rig: Rigs) -> None:
    """An engine that sleeps by itself is held: it would end another one, and stay asleep until its first request."""
    here = await rig()
    here.model.held = True
    body = b'{"model": "chat"}'
    ask = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await here.once(ask + body)).status == 200
    assert here.model.asked == 0 and here.engine.requests == []


async def test_the_burst_of_one_model_leaves_places_for_another(rig: Rigs) -> None:
    models = {name: FakeModel(name) for name in ("cold", "other")}
    here = await rig(config=GatewayOptions(hold_requests=8), models=models)

    async def ask(model: str) -> Client:
        client = await here.connect()
        await client.request("GET", f"/upstream/{model}/props")
        return client

    async def refused(model: str) -> str:
        answer = await (await ask(model)).answer()
        assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "waiting_room_full")
        return str(json.loads(answer.body)["error"]["message"])

    burst = []
    for number in range(6):  # three quarters
        burst.append(await ask("cold"))
        await until(lambda number=number: models["cold"].waiting == number + 1)
    assert "'cold': 6 requests" in await refused("cold")
    await ask("other")
    await until(lambda: models["other"].waiting == 1)
    await ask("other")
    await until(lambda: models["other"].waiting == 2)
    assert "'other': 8 requests" in await refused("other")
    burst[0].leave()
    await until(lambda: models["cold"].waiting == 5)
    await until(lambda: here.context.waiting.tickets == 7)
    await ask("cold")
    await until(lambda: models["cold"].waiting == 6)


async def test_bodies_that_wait_are_bounded_together(rig: Rigs) -> None:
    here = await rig(loading=True, config=GatewayOptions(hold_bytes=1_000_000))
    first = await here.connect()
    await first.request("POST", "/v1/chat/completions", b"x" * 700_000)
    await until(lambda: here.model.waiting == 1)
    second = await here.connect()
    await second.request("POST", "/v1/chat/completions", b"x" * 700_000)
    answer = await second.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "waiting_room_full")
    await here.model.ready(str(here.engine.path))
    assert json.loads((await first.answer()).body)["body_bytes"] == 700_000


@pytest.mark.parametrize("why_kept", ["waited", "looked_at"])
async def test_the_bytes_of_a_body_count_until_its_answer_has_ended(rig: Rigs, why_kept: str) -> None:
    """They are in memory so long, and light routes have no slots that would bound how many there are."""
    go = asyncio.Event()

    async def slowly(line, request):  # type: ignore[no-untyped-def]
        await line.stream()
        await line.chunk(b"1")
        await go.wait()
        await line.end()

    strict = "strict" if why_kept == "looked_at" else "only"
    here = await rig(slowly, loading=True, config=GatewayOptions(hold_bytes=1_000_000, unknown_model=strict))
    body = b'{"model": "chat", "content": "' + b"x" * 700_000 + b'"}'
    clients = [await here.connect() for _ in range(2)]
    if why_kept == "looked_at":
        await here.model.ready(str(here.engine.path))
    await clients[0].request("POST", "/tokenize", body)
    if why_kept == "waited":
        await until(lambda: here.model.waiting == 1)
        await here.model.ready(str(here.engine.path))
    await clients[0].head()
    await clients[0].chunk()
    assert here.context.waiting.held_bytes == len(body), "given back while the answer goes on"
    if why_kept == "looked_at":
        await clients[1].request("POST", "/tokenize", body)
        answer = await clients[1].answer()
        assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "waiting_room_full")
    go.set()
    assert await clients[0].chunks() == []
    await until(lambda: here.context.waiting.held_bytes == 0)


async def test_patience_is_the_clients_to_bound(rig: Rigs) -> None:
    here = await rig(loading=True)
    answer = await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\nEdgellm-Max-Wait: 0.05\r\n\r\n")
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "loading")
    assert answer.header("retry-after") == "5"
    assert here.model.waiting == 0
    bad = await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\nEdgellm-Max-Wait: nan\r\n\r\n")
    assert bad.status == 400


async def test_the_wait_ends_after_the_configured_time(rig: Rigs) -> None:
    here = await rig(loading=True, config=GatewayOptions(hold_seconds=0.05))
    assert (await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")).status == 503


async def test_a_model_at_rest_is_asked_now_and_then_until_patience_ends(rig: Rigs) -> None:
    """ensure_ready() of a stopped model returns at once, so calling it without a pause would take a whole core."""
    here = await rig(loading=True)
    await here.model.lost(State.STOPPED)
    answer = await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\nEdgellm-Max-Wait: 0.5\r\n\r\n")
    assert answer.status == 503
    assert here.model.asked <= 4


async def test_a_failed_model_answers_at_once_with_kind_and_hint_and_no_evidence(rig: Rigs) -> None:
    here = await rig(loading=True)
    waiting = await here.connect()
    await waiting.request("GET", "/props")
    await until(lambda: here.model.waiting == 1)
    await here.model.fail("bad_model", "pull it again")
    for answer in (
        await waiting.answer(),
        await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ):
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["kind"], error["hint"]) == (503, "bad_model", "pull it again")
        assert b"/secret" not in answer.body


async def test_a_sleeping_model_is_woken(rig: Rigs) -> None:
    here = await rig()
    await here.model.lost(State.SLEEPING)
    client = await here.connect()
    await client.request("GET", "/props")
    await until(lambda: here.model.waiting == 1)
    await here.model.ready(str(here.engine.path))
    assert (await client.answer()).status == 200


async def test_stopping_answers_who_waits(rig: Rigs) -> None:
    here = await rig(loading=True)
    client = await here.connect()
    await client.request("GET", "/props")
    await until(lambda: here.model.waiting == 1)
    closing = asyncio.ensure_future(here.serving.cleanup())
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "stopping")
    await closing


async def test_a_stream_may_ask_for_a_heartbeat_while_it_waits(rig: Rigs) -> None:
    async def events(line, request):  # type: ignore[no-untyped-def]
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await line.end()

    here = await rig(events, loading=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}", "Edgellm-Heartbeat: 1")
    head = await client.head()
    assert (head.status, head.header("content-type")) == (200, "text/event-stream")
    assert await client.chunk() == b": waiting LOADING\n\n"
    await here.model.ready(str(here.engine.path))
    assert await client.chunks() == [b"data: 1\n\n"]
    assert here.engine.requests[0].header("edgellm-heartbeat") is None


@pytest.mark.parametrize("known", ["at_once", "later", "no_longer"])
async def test_a_heartbeat_stream_says_that_its_model_is_degraded(rig: Rigs, known: str) -> None:
    async def events(line, request):  # type: ignore[no-untyped-def]
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await line.end()

    less = (Degraded("n_ctx", "8192", "4096", "memory"),)
    here = await rig(events, loading=True)
    if known != "later":
        here.model.state = replace(here.model.state, degraded=less)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}", "Edgellm-Heartbeat: 1")
    head = await client.head()
    assert head.header("edgellm-degraded") == (None if known == "later" else "n_ctx: 4096 instead of 8192")
    assert (await client.chunk()).startswith(b": waiting")
    here.model.state = replace(here.model.state, degraded=() if known == "no_longer" else less)
    await here.model.ready(str(here.engine.path))
    comment = {
        "at_once": [],
        "later": [b": degraded n_ctx: 4096 instead of 8192\n\n"],
        "no_longer": [b": no longer degraded\n\n"],
    }
    assert await client.chunks() == [*comment[known], b"data: 1\n\n"]


async def test_a_whole_answer_in_a_heartbeat_stream_is_a_success(rig: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    async def whole(line, request):  # type: ignore[no-untyped-def]
        await line.json({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})

    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(whole, loading=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}", "Edgellm-Heartbeat: 1")
    await client.head()
    await here.model.ready(str(here.engine.path))
    assert b'"completion_tokens"' in b"".join(await client.chunks())
    await until(lambda: caplog.messages)
    assert " 200 ok " in caplog.messages[0]
    assert here.context.stats.model("chat").completion_tokens == 2


async def test_a_heartbeat_ends_with_an_error_event_where_there_is_no_answer(rig: Rigs) -> None:
    here = await rig(loading=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}", "Edgellm-Heartbeat: 1")
    await client.head()
    await client.chunk()
    await here.model.fail("bad_model", "pull it again")
    event = b"".join(await client.chunks())
    assert json.loads(event.partition(b"data: ")[2])["error"]["kind"] == "bad_model"


async def test_an_engines_refusal_is_an_event_in_a_heartbeat_stream(rig: Rigs) -> None:
    async def refuse(line, request):  # type: ignore[no-untyped-def]
        await line.json({"error": {"message": "context too small", "code": 400}}, "400 Bad Request")

    here = await rig(refuse, loading=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}", "Edgellm-Heartbeat: 1")
    await client.head()
    await client.chunk()
    await here.model.ready(str(here.engine.path))
    event = b"".join(await client.chunks())
    assert json.loads(event.partition(b"data: ")[2])["error"]["message"] == "context too small"


STREAM = json.dumps({"messages": [], "stream": True}).encode()
OFTEN = GatewayOptions(heartbeat_s=0.02)


async def test_a_stream_that_waits_gets_comments_without_asking(rig: Rigs) -> None:
    async def events(line, request):  # type: ignore[no-untyped-def]
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await line.end()

    here = await rig(events, loading=True, config=OFTEN)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", STREAM)
    head = await client.head()
    assert (head.status, head.header("content-type")) == (200, "text/event-stream")
    assert [await client.chunk() for _ in range(3)] == [b": waiting LOADING\n\n"] * 3
    await here.model.ready(str(here.engine.path))
    assert [each for each in await client.chunks() if not each.startswith(b":")] == [b"data: 1\n\n"]
    assert here.engine.requests[0].body == STREAM


async def test_a_stream_that_waits_for_a_slot_gets_comments(rig: Rigs) -> None:
    go = asyncio.Event()

    async def slow(line, request):  # type: ignore[no-untyped-def]
        await go.wait()
        await line.stream()
        await line.chunk(b"data: [DONE]\n\n")
        await line.end()

    here = await rig(slow, config=OFTEN)
    here.model.slots = 1
    first, second = await here.connect(), await here.connect()
    await first.request("POST", "/v1/chat/completions", STREAM)
    await until(lambda: len(here.engine.requests) == 1)
    await second.request("POST", "/v1/chat/completions", STREAM)
    await second.head()
    assert await second.chunk() == b": waiting READY\n\n"
    go.set()
    for client in (first, second):
        if client is first:
            await client.head()
        assert (await client.chunks())[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("target", "body", "header"),
    [
        ("/v1/chat/completions", b'{"messages":[{"stream":true}]}', "Accept: */*"),
        ("/v1/chat/completions", b'{"stream":false}', "Accept: */*"),
        ("/v1/chat/completions", STREAM, "Edgellm-Heartbeat: 0"),
        ("/v1/embeddings", b"[true]", "Accept: */*"),
        ("/props", b"", "Accept: */*"),
    ],
)
async def test_what_is_no_stream_gets_no_comment(rig: Rigs, target: str, body: bytes, header: str) -> None:
    here = await rig(loading=True, config=OFTEN)
    client = await here.connect()
    await client.request("POST" if body else "GET", target, body, header)
    await until(lambda: here.model.waiting == 1)
    await asyncio.sleep(0.1)  # five times the interval
    await here.model.fail("bad_model", "pull it again")
    answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "bad_model")


async def test_until_the_first_comment_a_failure_keeps_its_status(rig: Rigs) -> None:
    here = await rig(loading=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", STREAM)
    await until(lambda: here.model.waiting == 1)
    await here.model.fail("bad_model", "pull it again")
    assert (await client.answer()).status == 503


@pytest.mark.parametrize(
    ("target", "start"),
    [
        ("/v1/chat/completions", b'data: {"error": {"message": '),
        ("/v1/messages", b'event: error\ndata: {"type": "error", "error": {"type": "api_error", '),
        ("/v1/responses", b'event: error\ndata: {"type": "error", "code": "bad_model", '),
    ],
)
async def test_after_the_first_comment_it_is_an_event_in_the_clients_shape_and_counted(
    rig: Rigs, caplog: pytest.LogCaptureFixture, target: str, start: bytes
) -> None:
    caplog.set_level(logging.INFO, "edge.access")
    here = await rig(loading=True, config=OFTEN)
    client = await here.connect()
    await client.request("POST", target, STREAM)
    await client.head()
    await client.chunk()
    await here.model.fail("bad_model", "pull it again")
    event = b"".join(each for each in await client.chunks() if not each.startswith(b":")).lstrip()
    assert event.startswith(start)
    await until(lambda: caplog.messages)
    assert f"{target} 200 error " in caplog.messages[0]


class OneAtATime:
    """An engine whose one slot is busy until the test lets it go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, line: Line, request: Received) -> None:
        await self.go.wait()
        await line.json({"body_bytes": len(request.body)})


async def test_bodies_that_wait_for_a_slot_are_bounded_together(rig: Rigs) -> None:
    """The queue behind a READY model holds memory as the wait for a start does."""
    engine = OneAtATime()
    here = await rig(engine, config=GatewayOptions(hold_bytes=1_000_000))
    here.model.slots = 1
    first, second, third = [await here.connect() for _ in range(3)]
    await first.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: len(here.engine.requests) == 1)
    await second.request("POST", "/v1/chat/completions", b"x" * 700_000)
    await until(lambda: here.context.waiting.held_bytes == 700_000)
    await third.request("POST", "/v1/chat/completions", b"x" * 700_000)
    answer = await third.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (503, "waiting_room_full")
    engine.go.set()
    assert [json.loads((await client.answer()).body)["body_bytes"] for client in (first, second)] == [2, 700_000]
    await until(lambda: here.context.waiting.held_bytes == 0)


async def test_the_wait_for_a_slot_ends_after_the_configured_time(rig: Rigs) -> None:
    engine = OneAtATime()
    here = await rig(engine, config=GatewayOptions(hold_seconds=0.05))
    here.model.slots = 1
    first, second = await here.connect(), await here.connect()
    await first.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: len(here.engine.requests) == 1)
    await second.request("POST", "/v1/chat/completions", b"{}")
    answer = await second.answer()
    assert (answer.status, json.loads(answer.body)["error"]["kind"]) == (429, "busy")
    engine.go.set()
    assert (await first.answer()).status == 200, "a request that runs is not limited"
    assert len(here.engine.requests) == 1


async def test_a_stream_that_waits_for_the_board_to_cool_gets_comments(rig: Rigs) -> None:
    async def events(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b"data: 1\n\n")
        await line.end()

    here = await rig(events, config=OFTEN)
    here.context.admission.govern(0.5, hold_new=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", STREAM)
    head = await client.head()
    assert (head.status, head.header("content-type")) == (200, "text/event-stream")
    assert [await client.chunk() for _ in range(2)] == [b": waiting READY\n\n"] * 2
    assert here.engine.requests == []
    here.context.admission.govern(1.0)
    assert [each for each in await client.chunks() if not each.startswith(b":")] == [b"data: 1\n\n"]
