"""FC-38: the engine's connection ends when the client's does, at whatever moment that is."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rig, Rigs
from tests.gateway.raw import Client, until

PROMISED_S = 2.0  # by the case; about 1 ms is measured
WAYS = ["leave", "reset", "half_close"]


async def _gone(here: Rig) -> None:
    await until(lambda: here.engine.lines)
    await asyncio.wait_for(here.engine.lines[0].gone.wait(), PROMISED_S)
    await until(lambda: here.model.open == 0)
    await until(lambda: here.context.stats.model("chat").gone == 1)
    assert here.context.admission.active("chat") == 0
    await until(lambda: len(here.context.connections) == 0)


async def _ask(here: Rig) -> Client:
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b'{"stream":true}')
    return client


async def _endless(line: Line, request: Received) -> None:
    await line.stream()
    while not line.gone.is_set():
        await line.chunk(b"data: x\n\n")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", WAYS)
async def test_fc38_in_mid_stream(rig: Rigs, how: str) -> None:
    here = await rig(_endless)
    client = await _ask(here)
    await client.head()
    for _ in range(3):
        await client.chunk()
    getattr(client, how)()
    await _gone(here)


@pytest.mark.parametrize("how", WAYS)
async def test_fc38_between_two_chunks(rig: Rigs, how: str) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.chunk(b"data: x\n\n")
        await line.until_gone()

    here = await rig(script)
    client = await _ask(here)
    await client.head()
    await client.chunk()
    getattr(client, how)()
    await _gone(here)


@pytest.mark.parametrize("how", WAYS)
async def test_fc38_before_the_first_token(rig: Rigs, how: str) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.stream()
        await line.until_gone()

    here = await rig(script)
    client = await _ask(here)
    await client.head()
    getattr(client, how)()
    await _gone(here)


@pytest.mark.parametrize("how", WAYS)
async def test_fc38_while_an_answer_in_one_piece_is_awaited(rig: Rigs, how: str) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.until_gone()

    here = await rig(script)
    client = await _ask(here)
    await until(lambda: here.engine.requests)
    getattr(client, how)()
    await _gone(here)


@pytest.mark.parametrize("how", WAYS)
async def test_fc38_in_mid_upload(rig: Rigs, how: str) -> None:
    async def script(line: Line, request: Received) -> None:
        await line.until_gone()

    here = await rig(script, read_body=False)
    client = await here.connect()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
    await client.send(head + b"x" * 500_000)
    await until(lambda: here.engine.requests)
    getattr(client, how)()
    await _gone(here)


async def test_clients_that_leave_while_we_write_leave_no_traceback(
    rig: Rigs, caplog: pytest.LogCaptureFixture
) -> None:
    async def flood(line: Line, request: Received) -> None:
        await line.stream()
        while not line.gone.is_set():
            await line.chunk(b"data: " + b"x" * 5000 + b"\n\n")

    here = await rig(flood)
    for _ in range(20):
        client = await _ask(here)
        await client.head()
        client.reset()
    await until(lambda: here.context.stats.model("chat").gone == 20)
    await until(lambda: len(here.context.connections) == 0)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_the_slot_is_free_for_the_next_at_once(rig: Rigs) -> None:
    here = await rig(_endless)
    here.model.slots = 1
    first = await _ask(here)
    await first.head()
    second = await _ask(here)
    await until(lambda: here.context.admission.queued("chat") == 1)
    first.leave()
    await second.head()
    assert await second.chunk() == b"data: x\n\n"
