"""A model behind the governor: who waits, who is let through, and when the engine is stopped and started."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from edge.status import Failure, ModelStatus, State
from edge.supervisor.governed import RETRY_S, Governed
from edge.telemetry.governor import AdmissionLimit
from edge.upstream import Endpoint, Progress

HOLD = AdmissionLimit(0.5, hold_new=True)
DRAIN = AdmissionLimit(0.5, hold_new=True, drain=True)
OPEN = AdmissionLimit()


class Model:
    """An Upstream whose state the test sets."""

    model_id, aliases, card = "chat", ("c",), {"n_ctx": 1}

    def __init__(self, state: State = State.READY, slots: int = 4) -> None:
        self.state, self.slots = state, slots
        self.calls: list[str] = []
        self.changed = asyncio.Event()
        self.broke: list[int] = []

    def become(self, state: State) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    def status(self) -> ModelStatus:
        failure = Failure("broken", "", "") if self.state is State.FAILED else None
        return ModelStatus("chat", self.state, failure=failure)

    def endpoint(self) -> Endpoint | None:
        return Endpoint("/s", 1) if self.state is State.READY else None

    async def ensure_ready(self) -> ModelStatus:
        while self.state not in (State.READY, State.FAILED, State.STOPPED):
            await self.changed.wait()
        return self.status()

    def expected_ready_in_s(self) -> float | None:
        return 7.0

    def request(self) -> AbstractContextManager[Progress]:
        return nullcontext(self)  # type: ignore[arg-type]

    def moved(self) -> None: ...

    def broken(self, generation: int) -> None:
        self.broke.append(generation)


def governed(model: Model) -> Governed:
    def stop() -> None:
        model.calls.append("stop")
        model.become(State.STOPPED)

    def start() -> None:
        model.calls.append("start")
        model.become(State.LOADING)

    return Governed(model, stop, start, lambda: "tj 104 °C")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_open_it_is_the_model_itself() -> None:
    model = Model()
    seen = governed(model)
    assert (seen.model_id, seen.aliases, seen.card, seen.slots) == ("chat", ("c",), {"n_ctx": 1}, 4)
    assert seen.endpoint() == model.endpoint()
    assert (await seen.ensure_ready()).state is State.READY
    assert seen.expected_ready_in_s() == 7.0
    seen.broken(3)
    assert model.broke == [3]
    with seen.request() as progress:
        progress.moved()


async def test_holding_is_the_gateway_s_matter() -> None:
    """What needs no slot (/props, /tokenize) still finds its engine."""
    seen = governed(Model())
    seen.apply(HOLD)
    assert seen.endpoint() is not None
    assert (await seen.ensure_ready()).state is State.READY


async def test_heat_that_comes_while_one_waits_for_the_load_is_waited_out_too() -> None:
    model = Model(State.LOADING)
    seen = governed(model)
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    seen.apply(DRAIN)
    await settle()
    assert model.calls == ["stop"]
    assert not waiting.done()
    seen.apply(OPEN)
    model.become(State.READY)
    assert (await waiting).state is State.READY


async def test_who_is_stopped_for_heat_says_so_until_it_is_started_again() -> None:
    model = Model()
    seen = governed(model)
    seen.apply(DRAIN)
    failure = seen.status().failure
    assert failure is not None
    assert (failure.kind, failure.evidence) == ("too_hot", "tj 104 °C")
    seen.apply(OPEN)
    assert seen.status().failure is None


async def test_a_failed_model_keeps_nobody_waiting() -> None:
    model = Model(State.LOADING)
    seen = governed(model)
    seen.apply(DRAIN)
    model.become(State.FAILED)
    assert (await seen.ensure_ready()).state is State.FAILED


async def test_draining_stops_once_and_starts_once() -> None:
    model = Model()
    seen = governed(model)
    for limit in (HOLD, DRAIN, DRAIN):
        seen.apply(limit)
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    assert model.calls == ["stop"]
    assert seen.endpoint() is None
    assert seen.expected_ready_in_s() == RETRY_S
    assert not waiting.done()
    seen.apply(AdmissionLimit(0.5))
    seen.apply(OPEN)
    await settle()
    assert model.calls == ["stop", "start"]
    model.become(State.READY)
    assert (await waiting).state is State.READY


@pytest.mark.parametrize("state", [State.SLEEPING, State.STOPPED, State.FAILED, State.DRAINING])
async def test_an_engine_that_did_not_run_is_not_started_by_cooling(state: State) -> None:
    model = Model(state)
    seen = governed(model)
    seen.apply(DRAIN)
    seen.apply(OPEN)
    assert model.calls == []


async def test_who_leaves_while_waiting_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    seen: Any = governed(Model(State.LOADING))
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await settle()
    assert asyncio.all_tasks() == before
