"""Slots, the line behind them, 429."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.gateway.admission import Admission, SlotLease
from edge.gateway.config import GatewayOptions
from edge.gateway.openai import RejectedError
from edge.supervisor.status import State
from tests.fakes.upstream.engine import Line, Received
from tests.fakes.upstream.model import FakeModel
from tests.gateway.conftest import Rigs
from tests.gateway.raw import until


class Gate:
    """An engine that works on a request until the test lets it go."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)

    async def __call__(self, line: Line, request: Received) -> None:
        if request.method == "POST":
            await self.go.acquire()
        await line.json({"ok": True})


async def _wait(waiter: asyncio.Future[None], late: object) -> None:
    await waiter


async def test_turns_come_in_order_and_no_more_than_there_are_slots() -> None:
    admission, model = Admission(8), FakeModel()
    model.slots = 2
    order: list[int] = []

    async def work(number: int) -> None:
        turn = await admission.enter(model, _wait, patient=False)
        order.append(number)
        assert admission.active("chat") <= 2
        await asyncio.sleep(0)
        turn.leave()

    await asyncio.gather(*(work(number) for number in range(8)))
    assert order == list(range(8))
    assert (admission.active("chat"), admission.queued("chat")) == (0, 0)


async def test_leaving_the_line_or_one_s_turn_strands_nobody() -> None:
    admission, model = Admission(8), FakeModel()
    model.slots = 1
    first = await admission.enter(model, _wait, patient=False)
    second = asyncio.ensure_future(admission.enter(model, _wait, patient=False))
    third = asyncio.ensure_future(admission.enter(model, _wait, patient=False))
    await asyncio.sleep(0)
    first.leave()  # the second's turn, which it never takes
    second.cancel()
    await asyncio.sleep(0)
    (await asyncio.wait_for(third, 5)).leave()
    assert admission.active("chat") == 0


async def test_the_governor_reduces_and_lifts() -> None:
    admission, model = Admission(8), FakeModel()
    model.slots = 3
    admission.govern(0.5)
    first = await admission.enter(model, _wait, patient=False)
    assert admission.enter_now(model) is None
    second = asyncio.ensure_future(admission.enter(model, _wait, patient=False))
    await asyncio.sleep(0)
    assert not second.done()
    admission.govern(1.0)
    (await asyncio.wait_for(second, 5)).leave()
    first.leave()
    admission.govern(0.0)
    turn = admission.enter_now(model)
    assert turn is not None, "one request always goes through"


def two_models(slots: int = 1) -> tuple[Admission, FakeModel, FakeModel]:
    chat, embed = FakeModel("chat"), FakeModel("embed")
    chat.slots = embed.slots = slots
    return Admission(0, {"chat": chat, "embed": embed}), chat, embed


async def test_the_governor_s_limit_is_shared_and_the_first_rank_goes_first() -> None:
    admission, chat, embed = two_models()
    admission.rank = lambda model: (-(model == "embed"), True)
    admission.govern(0.5)
    first = await admission.enter(chat, _wait, patient=False)
    assert admission.enter_now(embed) is None, "one of two slots may be busy, and one is"
    # No place in the queue, but it waits as at HOT: the limit passes.
    later = asyncio.ensure_future(admission.enter(embed, _wait, patient=False))
    again = asyncio.ensure_future(admission.enter(chat, _wait, patient=True))
    await asyncio.sleep(0)
    assert not later.done() and not again.done()
    first.leave()
    await asyncio.sleep(0)
    assert later.done() and not again.done(), "the higher priority goes first, not the one that asked first"
    (await later).leave()
    (await asyncio.wait_for(again, 5)).leave()


async def test_requests_that_run_are_not_cut_and_a_lifted_limit_lets_all_in() -> None:
    admission, chat, embed = two_models(slots=2)
    running = [await admission.enter(each, _wait, patient=False) for each in (chat, chat, embed, embed)]
    admission.govern(0.25)
    assert (admission.active("chat"), admission.active("embed")) == (2, 2)
    waiting = [asyncio.ensure_future(admission.enter(each, _wait, patient=True)) for each in (chat, embed)]
    for lease in running[:3]:
        await asyncio.sleep(0)
        lease.leave()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting), "one of four slots may be busy, and one is"
    admission.govern(1.0)
    for task in waiting:
        (await asyncio.wait_for(task, 5)).leave()
    running[3].leave()


async def test_light_requests_and_a_board_without_a_limit_share_nothing() -> None:
    admission, chat, embed = two_models()
    admission.govern(0.5)
    first = await admission.enter(chat, _wait, patient=False)
    light = admission.enter_now(embed, slot=False)
    assert light is not None
    admission.govern(1.0)
    second = admission.enter_now(embed)
    assert second is not None
    for lease in (first, light, second):
        lease.leave()


async def test_a_model_whose_own_slots_are_busy_is_busy_not_hot() -> None:
    admission, chat, _ = two_models()
    admission.govern(0.5)
    first = await admission.enter(chat, _wait, patient=False)
    with pytest.raises(RejectedError) as error:
        await admission.enter(chat, _wait, patient=False)
    assert error.value.fault.kind == "busy"
    first.leave()


async def test_a_hot_board_lets_new_requests_wait_and_then_tells_them_why(rig: Rigs) -> None:
    here = await rig(config=GatewayOptions(queue_requests=0))
    here.context.admission.govern(0.5, hold_new=True)
    client = await here.connect()
    await client.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.context.admission.queued("chat") == 1)
    hot = await here.once(
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nEdgellm-Max-Wait: 0\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert (hot.status, json.loads(hot.body)["error"]["kind"]) == (503, "too_hot")
    assert hot.header("retry-after")
    here.context.admission.govern(1.0)
    assert (await client.answer()).status == 200


async def test_a_pause_for_the_power_limit_is_not_reported_as_heat(rig: Rigs) -> None:
    here = await rig()
    here.context.admission.govern(1.0, hold_new=True, cause="power")
    paused = await here.once(
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nEdgellm-Max-Wait: 0\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert (paused.status, json.loads(paused.body)["error"]["kind"]) == (503, "power_limit")
    assert paused.header("retry-after")


async def test_a_restarted_engine_with_fewer_slots_lets_fewer_in_from_the_line() -> None:
    admission, model = Admission(8), FakeModel()
    model.slots = 5
    admission.govern(1.0, hold_new=True)
    waiting = [asyncio.ensure_future(admission.enter(model, _wait, patient=True)) for _ in range(4)]
    await asyncio.sleep(0)
    model.slots = 1
    admission.govern(1.0)
    await asyncio.sleep(0)
    assert admission.active("chat") == 1
    for task in waiting:
        (await asyncio.wait_for(task, 5)).leave()


async def test_the_line_is_short_but_not_for_those_who_waited_before() -> None:
    admission, model = Admission(0), FakeModel()
    model.slots = 1
    first = await admission.enter(model, _wait, patient=False)
    with pytest.raises(RejectedError) as error:
        await admission.enter(model, _wait, patient=False)
    assert (error.value.fault.status, error.value.fault.kind) == (429, "busy")
    assert (error.value.fault.retry_after_s or 0) > 0
    patient = asyncio.ensure_future(admission.enter(model, _wait, patient=True))
    await asyncio.sleep(0)
    first.leave()
    (await asyncio.wait_for(patient, 5)).leave()


async def test_a_busy_model_answers_429_and_serves_what_needs_no_slot(rig: Rigs) -> None:
    gate = Gate()
    here = await rig(gate, config=GatewayOptions(queue_requests=1))
    here.model.slots = 1
    clients = [await here.connect() for _ in range(2)]
    await clients[0].request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.engine.requests)
    await clients[1].request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.context.admission.queued("chat") == 1)
    busy = await here.once(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
    error = json.loads(busy.body)["error"]
    assert (busy.status, error["type"], error["code"]) == (429, "rate_limit_error", 429)
    assert int(busy.header("retry-after") or 0) >= 1
    assert (await here.once(b"GET /props HTTP/1.1\r\nHost: localhost\r\n\r\n")).status == 200
    gate.go.release()
    gate.go.release()
    assert [(await client.answer()).status for client in clients] == [200, 200]
    assert len([request for request in here.engine.requests if request.method == "POST"]) == 2


@pytest.mark.parametrize("how", ["leave", "reset", "half_close"])
async def test_fc38_a_client_that_leaves_the_line_is_never_worked_for(rig: Rigs, how: str) -> None:
    gate = Gate()
    here = await rig(gate)
    here.model.slots = 1
    first, second = await here.connect(), await here.connect()
    await first.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.engine.requests)
    await second.request("POST", "/v1/chat/completions", b"x" * 700_000)
    await until(lambda: here.context.admission.queued("chat") == 1)
    getattr(second, how)()
    await until(lambda: here.context.admission.queued("chat") == 0)
    gate.go.release()
    assert (await first.answer()).status == 200
    assert len(here.engine.requests) == 1


async def test_the_line_follows_the_model_to_its_next_child(rig: Rigs) -> None:
    gate = Gate()
    here = await rig(gate)
    here.model.slots = 1
    first, second = await here.connect(), await here.connect()
    await first.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.engine.requests)
    await second.request("POST", "/v1/chat/completions", b"{}")
    await until(lambda: here.context.admission.queued("chat") == 1)
    await here.model.lost(State.DRAINING)
    gate.go.release()
    assert (await first.answer()).status == 200
    await until(lambda: here.model.waiting == 1)
    await here.model.ready(str(here.engine.path))
    gate.go.release()
    assert (await second.answer()).status == 200


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("govern"), st.sampled_from([0.0, 0.34, 0.5, 1.0])),
        st.tuples(st.just("hold"), st.booleans()),
        st.tuples(st.just("slots"), st.integers(1, 5)),
        st.tuples(st.just("turn"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["chat", "embed", "leave", "govern"]), st.integers(0, 8)), max_size=40))
def test_no_history_of_two_models_strands_a_waiter_or_exceeds_the_shared_limit(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_shared_history(steps))


async def _shared_history(steps: list[tuple[str, int]]) -> None:
    admission, *both = two_models(slots=2)
    models = {each.model_id: each for each in both}
    asked: list[asyncio.Task[SlotLease]] = []
    allowed = 4

    def active() -> int:
        return sum(admission.active(name) for name in models)

    def inside() -> list[asyncio.Task[SlotLease]]:
        return [task for task in asked if task.done()]

    def leave(task: asyncio.Task[SlotLease]) -> None:
        asked.remove(task)
        task.result().leave()

    for what, value in steps:
        before = active()
        if what in models:
            asked.append(asyncio.ensure_future(admission.enter(models[what], _wait, patient=True)))
        elif what == "leave" and inside():
            leave(inside()[value % len(inside())])
        elif what == "govern":
            admission.govern(value / 8)
            allowed = max(1, value // 2)
        for _ in range(3):
            await asyncio.sleep(0)
        assert active() <= max(allowed, before)
        assert active() >= min(1, len(asked))
    while asked:
        assert inside(), "a request waits though none is served"
        leave(inside()[0])
        for _ in range(3):
            await asyncio.sleep(0)
    assert active() == 0


@given(STEPS)
def test_no_history_strands_a_waiter_or_lets_too_many_in(steps: list[tuple[str, Any]]) -> None:
    asyncio.run(_history(steps))


async def _history(steps: list[tuple[str, Any]]) -> None:
    admission, model = Admission(3), FakeModel()
    model.slots = 2
    asked: list[asyncio.Task[SlotLease]] = []
    inside: list[SlotLease] = []
    fraction, held = 1.0, False

    def collect() -> None:
        for task in [each for each in asked if each.done()]:
            asked.remove(task)
            if not task.cancelled() and task.exception() is None:
                inside.append(task.result())

    for what, value in steps:
        before = admission.active("chat")  # a turn that was given counts before its waiter runs
        if what == "enter":
            asked.append(asyncio.ensure_future(admission.enter(model, _wait, patient=value)))
        elif what == "leave" and inside:
            inside.pop(value % len(inside)).leave()
        elif what == "cancel" and asked:
            asked[value % len(asked)].cancel()
        elif what == "govern":
            fraction = value
            admission.govern(fraction, held)
        elif what == "hold":
            held = value
            admission.govern(fraction, held)
        elif what == "slots":
            model.slots = value
        if what in ("turn", "slots"):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        collect()
        limit = max(1, int(model.slots * fraction))
        assert len(inside) <= admission.active("chat") <= max(limit, before), (
            "more than there are slots, and not because there were fewer since"
        )
    held = False
    admission.govern(1.0)
    while inside or asked:
        for _ in range(3):
            await asyncio.sleep(0)
        collect()
        assert inside or not asked, "a request waits though none is served"
        for turn in inside:
            turn.leave()
        inside.clear()
    assert (admission.active("chat"), admission.queued("chat")) == (0, 0)
