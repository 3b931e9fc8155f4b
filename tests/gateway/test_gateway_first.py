"""The spine: hold, pass on, answer probes; and the first request of an engine, which makes it READY."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rigs
from tests.gateway.raw import until

CHAT = "/v1/chat/completions"
ANSWER = {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 3}}


async def test_a_request_before_the_model_is_ready_is_held_and_then_answered(rig: Rigs) -> None:
    here = await rig(loading=True)
    early = asyncio.ensure_future(here.client.post("/v1/chat/completions", data=b"x" * 1000))
    await until(lambda: here.model.waiting)
    async with here.client.get("/health") as probe:
        assert probe.status == 503
        assert (await probe.json())["error"]["message"] == "Loading model"
    await here.model.ready(str(here.engine.path))
    async with await early as answer:
        assert answer.status == 200
        assert await answer.json() == {"ok": True, "body_bytes": 1000}
    async with here.client.get("/health") as probe:
        assert await probe.json() == {"status": "ok"}


async def test_a_held_request_may_be_the_engines_first_and_its_token_is_reported(rig: Rigs) -> None:
    async def answer(line: Line, request: Received) -> None:
        await line.json(ANSWER)

    here = await rig(answer, loading=True)
    held = asyncio.ensure_future(here.client.post(CHAT, data=b"{}"))
    await until(lambda: here.model.waiting)
    await here.model.admits(str(here.engine.path))
    async with await held as answered:
        assert answered.status == 200 and await answered.json() == ANSWER
    assert here.model.answered == [1]
    async with here.client.get("/health") as probe:
        assert probe.status == 503, "the supervisor has yet to make it READY"


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_what_an_engine_refuses_as_its_first_is_sent_again_once_it_is_ready(rig: Rigs, status: int) -> None:
    """A 503 of a loading engine (FC-31), or a 400 of one that can complete nothing, is no answer to a client."""

    async def answer(line: Line, request: Received) -> None:
        if here.model.place is None:
            await line.json({"error": {"message": "no"}}, f"{status} Refused")
        else:
            await line.json(ANSWER)

    here = await rig(answer, loading=True)
    held = asyncio.ensure_future(here.client.post(CHAT, data=b"{}"))
    await until(lambda: here.model.waiting)
    await here.model.admits(str(here.engine.path))
    await until(lambda: len(here.engine.requests) == 1 and here.model.waiting and not here.model.open)
    await here.model.ready(str(here.engine.path))
    async with await held as answered:
        assert answered.status == 200
    assert (len(here.engine.requests), here.model.answered) == (2, [])


async def test_an_engine_that_dies_of_its_first_request_and_fails_is_a_503(rig: Rigs) -> None:
    async def die(line: Line, request: Received) -> None:
        line.cut()

    here = await rig(die, loading=True)
    held = asyncio.ensure_future(here.client.post(CHAT, data=b"{}"))
    await until(lambda: here.model.waiting)
    await here.model.admits(str(here.engine.path))
    await until(lambda: here.engine.requests and here.model.waiting and not here.model.open)
    await here.model.fail("bad_model", "pull it again")
    async with await held as answered:
        assert (answered.status, (await answered.json())["error"]["kind"]) == (503, "bad_model")
    assert here.context.stats.model("chat").retries == 0


async def test_only_inference_may_be_first(rig: Rigs) -> None:
    here = await rig(loading=True)
    held = asyncio.ensure_future(here.client.post("/tokenize", data=b"{}"))
    await until(lambda: here.model.waiting)
    await here.model.admits(str(here.engine.path))
    chat = asyncio.ensure_future(here.client.post(CHAT, data=b"{}"))
    (await chat).close()
    assert not held.done() and [request.target for request in here.engine.requests] == [CHAT]
    await here.model.ready(str(here.engine.path))
    (await held).close()


async def test_a_streams_first_text_counts_and_its_role_and_progress_do_not(rig: Rigs) -> None:
    steps: asyncio.Queue[bytes] = asyncio.Queue()

    async def stream(line: Line, request: Received) -> None:
        await line.stream()
        while chunk := await steps.get():
            await line.chunk(chunk)
        await line.end()

    def event(**delta: object) -> bytes:
        return f"data: {json.dumps({'choices': [{'delta': delta}], 'prompt_progress': {'total': 9}})}\n\n".encode()

    here = await rig(stream, loading=True)
    held = asyncio.ensure_future(here.client.post(CHAT, data=b"{}"))
    await until(lambda: here.model.waiting)
    await here.model.admits(str(here.engine.path))
    async with await held as answered:
        for chunk in (event(role="assistant", content=None), event(content=""), b": comment\n\n"):
            steps.put_nowait(chunk)
            await answered.content.readany()
        assert here.model.answered == []
        for _ in range(2):  # it is seen with the next chunk
            steps.put_nowait(event(content="Hi"))
            await answered.content.readany()
        await until(lambda: here.model.answered == [1])
        steps.put_nowait(b"")
        await answered.read()
    assert here.model.answered == [1]
