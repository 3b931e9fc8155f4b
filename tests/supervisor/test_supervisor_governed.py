"""A model behind the governor: who waits, who is let through, and when the engine is stopped and started."""

import asyncio
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.status import Failure, ModelStatus, State
from edge.supervisor.governed import RETRY_S, Governed
from edge.supervisor.hooks import Hooks
from edge.supervisor.slot import Slot
from edge.supervisor.state import Machine, Then
from edge.supervisor.supervisor import Supervisor
from edge.supervisor.terms import Terms
from edge.supervisor.turnover import after, beside, quietly
from edge.telemetry.governor import AdmissionLimit
from edge.upstream import Endpoint, Progress
from tests.supervisor.rig import FAST, PATIENCE_S, PATTERNS, Rig, rigged

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


class Engine:
    """What can be stopped."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def stop(self) -> None:
        self.model.calls.append("stop")
        self.model.become(State.STOPPED)


def governed(model: Model) -> Governed:
    def start() -> None:
        model.calls.append("start")
        model.become(State.LOADING)

    seen = Governed(model, start, lambda: "tj 104 °C")
    seen.became(Engine(model), model.state)
    return seen


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


async def test_one_that_shall_follow_is_stopped_too() -> None:
    """A reload's new engine rises beside the one that serves."""
    model = Model()
    seen = governed(model)
    new = Model(State.LOADING)
    seen.became(Engine(new), State.LOADING)
    seen.apply(DRAIN)
    assert (model.calls, new.calls) == (["stop"], ["stop"])


async def test_a_model_that_failed_meanwhile_is_not_started_by_cooling() -> None:
    model = Model()
    seen = governed(model)
    seen.apply(DRAIN)
    model.become(State.FAILED)
    seen.apply(OPEN)
    assert model.calls == ["stop"]


async def test_who_waits_for_a_model_that_is_removed_is_told() -> None:
    seen = governed(Model())
    seen.apply(DRAIN)
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    seen.remove()
    status = await waiting
    assert (status.state, status.failure and status.failure.kind) == (State.FAILED, "removed")


def hot(rig: Rig) -> Governed:
    """The rig's supervisor behind a governor that stays too hot until told otherwise."""
    seen = Governed(Slot(rig.supervisor), rig.supervisor.start, lambda: "tj 104 °C")

    def became(supervisor: Supervisor, before: Machine, after: Machine) -> None:
        rig.machines.append(after)
        if after.state is not before.state:
            seen.became(supervisor, after.state)

    rig.supervisor.hooks = replace(rig.supervisor.hooks, on_change=became)
    return seen


async def cools(rig: Rig, seen: Governed) -> None:
    """Stopped and said to be, no child; then it serves."""
    await rig.settle(State.STOPPED)
    assert seen.status().pid is None
    failure = seen.status().failure
    assert failure is not None and failure.kind == "too_hot"
    seen.apply(OPEN)
    await rig.ready()
    assert seen.status().failure is None


async def test_a_restart_that_is_under_way_when_it_gets_too_hot(tmp_path: Path) -> None:
    """DRAINING or STOPPING then, and on its way up again afterwards."""
    async with rigged(tmp_path, start=False) as rig:
        seen = hot(rig)
        rig.supervisor.start()
        await rig.ready()
        rig.supervisor.restart()
        await rig.settle(State.DRAINING, State.STOPPING)
        seen.apply(DRAIN)
        await cools(rig, seen)
        assert rig.states.count("READY") == 2


async def test_a_restart_while_it_is_too_hot(tmp_path: Path) -> None:
    async with rigged(tmp_path, start=False) as rig:
        seen = hot(rig)
        rig.supervisor.start()
        await rig.ready()
        seen.apply(DRAIN)
        await rig.settle(State.STOPPED)
        rig.supervisor.restart()
        await rig.until(lambda: rig.states.count("STARTING") == 2)
        await cools(rig, seen)
        assert rig.states.count("READY") == 2


async def test_a_crash_when_it_gets_too_hot(tmp_path: Path) -> None:
    """In BACKOFF nothing runs, and nothing shall when it is over."""
    terms = Terms(policy=replace(FAST, backoff_s=(60,)))
    async with rigged(tmp_path, start=False, terms=terms) as rig:
        seen = hot(rig)
        rig.supervisor.start()
        await rig.ready()
        os.kill(rig.pids[-1], signal.SIGKILL)
        await rig.settle(State.BACKOFF)
        seen.apply(DRAIN)
        await cools(rig, seen)
        assert rig.states.count("STARTING") == 2


async def test_a_start_while_it_is_too_hot(tmp_path: Path) -> None:
    """A model that was added, or arrived."""
    async with rigged(tmp_path, start=False) as rig:
        seen = hot(rig)
        seen.apply(DRAIN)
        rig.supervisor.start()
        await rig.until(lambda: "STARTING" in rig.states)
        await cools(rig, seen)


async def test_who_makes_place_for_another_is_not_started_again(tmp_path: Path) -> None:
    """Cool again, or restarted, while a reload waits for its end: the reload does not wait for ever."""
    async with rigged(tmp_path) as rig:
        await rig.ready()
        slot = Slot(rig.supervisor)
        new = Supervisor(rig.supervisor.model, tmp_path / "n.sock", PATTERNS, Terms(policy=FAST, preload=False))
        owner = asyncio.create_task(new.run())
        with rig.supervisor.request():  # it drains for as long as this is open
            turning = asyncio.create_task(quietly(slot, new))
            await rig.settle(State.DRAINING)
            rig.supervisor.restart()
            await settle()
            assert rig.supervisor.machine.then is Then.HOME
        await asyncio.wait_for(turning, PATIENCE_S)
        assert rig.supervisor.machine.state is State.STOPPED
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)


@pytest.mark.parametrize(("turn", "how", "kind"), [("beside", "back", "stopped"), ("after", "after", None)])
async def test_a_reload_whose_new_engine_is_stopped_for_heat(
    tmp_path: Path, turn: str, how: str, kind: str | None
) -> None:
    """Beside the old one nothing has changed, and it is said why; after it the new one keeps the place."""
    async with rigged(tmp_path) as rig:
        await rig.ready()
        slot = Slot(rig.supervisor)
        hot = Hooks(on_change=lambda new, before, after: new.stop() if after.state is State.STARTING else None)
        new = Supervisor(rig.supervisor.model, tmp_path / "n.sock", PATTERNS, Terms(policy=FAST), hot)
        owner = asyncio.create_task(new.run())
        turned = await asyncio.wait_for(beside(slot, new) if turn == "beside" else after(slot, new, room), PATIENCE_S)
        assert (turned.how, turned.failure and turned.failure.kind) == (how, kind)
        assert slot.supervisor is (rig.supervisor if turn == "beside" else new)
        assert new.machine.state is State.STOPPED
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)


async def room() -> bool:
    return True


async def test_who_leaves_while_waiting_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    seen: Any = governed(Model(State.LOADING))
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await settle()
    assert asyncio.all_tasks() == before
