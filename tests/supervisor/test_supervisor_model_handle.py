"""One handle over placeholder, supervisor and replacement: which requests wait, and when heat stops the engine."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from edge.daemon.reload import blue_green, in_place, while_asleep
from edge.plan.plan import EngineOptions
from edge.supervisor.model_handle import HOT_RETRY_S, ModelHandle
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.state import AfterExit, SupervisorState
from edge.supervisor.status import Failure, Gate, ModelStatus, State
from edge.supervisor.supervisor import Supervisor, SupervisorCallbacks
from edge.supervisor.traffic import Traffic
from edge.supervisor.upstream import Endpoint
from edge.supervisor.variants import model_info, template_file
from edge.telemetry.governor import AdmissionLimit
from edge.units import MIB
from tests.supervisor.rig import FAST, FILE, PATIENCE_S, PATTERNS, Rig, model_plan, rigged, settings

HOLD = AdmissionLimit(0.5, hold_new=True)
DRAIN = AdmissionLimit(0.5, hold_new=True, drain=True)
OPEN = AdmissionLimit()


class Model:
    """The part of a supervisor that a handle uses; the test sets its state."""

    model_id, aliases, model_info = "chat", ("c",), {"n_ctx": 1}

    def __init__(self, state: State = State.READY, slots: int = 4) -> None:
        self.state, self.slots = state, slots
        self.started_at_s: float | None = None
        self.calls: list[str] = []
        self.traffic = Traffic()
        self.changed = asyncio.Event()

    def become(self, state: State) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    def status(self) -> ModelStatus:
        failure = Failure("broken", "", "") if self.state is State.FAILED else None
        return ModelStatus("chat", self.state, failure=failure)

    def endpoint(self, *, first: bool = False) -> Endpoint | None:
        return Endpoint("/s", 1) if self.state is State.READY else None

    async def ensure_ready(self, *, first: bool = False, start: bool = True) -> ModelStatus:
        while self.state not in (State.READY, State.FAILED, State.STOPPED):
            await self.changed.wait()
        return self.status()

    def expected_ready_in_s(self) -> float | None:
        return 7.0

    def start(self) -> None:
        self.calls.append("start")
        self.become(State.LOADING)

    def stop(self) -> None:
        self.calls.append("stop")
        self.become(State.STOPPED)

    @property
    def supervisor(self) -> Supervisor:
        return cast(Supervisor, self)


def handle_of(model: Model) -> ModelHandle:
    handle = ModelHandle("chat", supervisor=model.supervisor)
    handle.supervisor_changed(model.supervisor, model.state)
    return handle


def limit(handle: ModelHandle, new: AdmissionLimit) -> None:
    handle.limit_admission(new, "tj 104 °C")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_open_it_is_the_model_itself() -> None:
    model = Model()
    seen = handle_of(model)
    assert (seen.model_id, seen.aliases, seen.model_info, seen.slots) == ("chat", ("c",), {"n_ctx": 1}, 4)
    assert seen.endpoint() == model.endpoint()
    assert (await seen.ensure_ready()).state is State.READY
    assert seen.expected_ready_in_s() == 7.0
    with seen.request() as progress:
        progress.moved()
        assert model.traffic.open == 1


async def test_elapsed_is_of_the_start_that_is_under_way() -> None:
    model = Model(State.STARTING)
    seen = handle_of(model)
    assert seen.elapsed_s() is None, "nothing is spawned yet"
    model.started_at_s = time.monotonic() - 5.0
    for state in (State.STARTING, State.LOADING, State.WARMING):
        model.become(state)
        elapsed_s = seen.elapsed_s()
        assert elapsed_s is not None and elapsed_s >= 5.0
    for state in (State.READY, State.BACKOFF, State.SLEEPING, State.FAILED):
        model.become(state)
        assert seen.elapsed_s() is None, state
    assert ModelHandle("chat").elapsed_s() is None


def test_the_file_of_the_chat_template_is_the_model_s_unless_another_one_is_given() -> None:
    model = model_plan(("/engine", "--chat-template-kwargs", "{}"))
    (plan,) = model.ladder.plans
    assert template_file(model, plan) == FILE.path
    smaller = replace(FILE, path="/nowhere/smaller.gguf")
    assert template_file(model, replace(plan, model=smaller)) == smaller.path, "of this rung"
    for given in (("--chat-template-file", "/t.jinja"), ("--chat-template-file=/t.jinja",)):
        assert template_file(model, replace(plan, argv=(*plan.argv, *given))) is None
    embedded = EngineOptions(params={"chat_template_file": "/t.jinja"})
    assert template_file(model, replace(plan, options=embedded)) is None
    assert ModelHandle("chat").template_file is None


async def test_holding_is_the_gateway_s_matter() -> None:
    """What needs no slot (/props, /tokenize) still finds its engine."""
    seen = handle_of(Model())
    limit(seen, HOLD)
    assert seen.endpoint() is not None
    assert (await seen.ensure_ready()).state is State.READY


async def test_heat_that_comes_while_one_waits_for_the_load_is_waited_out_too() -> None:
    model = Model(State.LOADING)
    seen = handle_of(model)
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    limit(seen, DRAIN)
    await settle()
    assert model.calls == ["stop"]
    assert not waiting.done()
    limit(seen, OPEN)
    model.become(State.READY)
    assert (await waiting).state is State.READY


async def test_who_is_stopped_for_heat_says_so_until_it_is_started_again() -> None:
    model = Model()
    seen = handle_of(model)
    limit(seen, DRAIN)
    failure = seen.status().failure
    assert failure is not None
    assert (failure.kind, failure.evidence) == ("too_hot", "tj 104 °C")
    limit(seen, OPEN)
    assert seen.status().failure is None


async def test_a_model_that_sleeps_on_a_critical_board_is_too_hot_and_is_not_woken() -> None:
    model = Model(State.SLEEPING)
    seen = handle_of(model)
    assert seen.status().failure is None
    limit(seen, DRAIN)
    failure = seen.status().failure
    assert failure is not None and failure.kind == "too_hot"
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    assert model.calls == [] and not waiting.done()
    limit(seen, OPEN)
    assert seen.status().failure is None
    waiting.cancel()


async def test_a_failed_model_keeps_nobody_waiting() -> None:
    model = Model(State.LOADING)
    seen = handle_of(model)
    limit(seen, DRAIN)
    model.become(State.FAILED)
    assert (await seen.ensure_ready()).state is State.FAILED


async def test_draining_stops_once_and_starts_once() -> None:
    model = Model()
    seen = handle_of(model)
    for each in (HOLD, DRAIN, DRAIN):
        limit(seen, each)
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    assert model.calls == ["stop"]
    assert seen.endpoint() is None
    assert seen.expected_ready_in_s() == HOT_RETRY_S
    assert not waiting.done()
    limit(seen, AdmissionLimit(0.5))
    limit(seen, OPEN)
    await settle()
    assert model.calls == ["stop", "start"]
    model.become(State.READY)
    assert (await waiting).state is State.READY


@pytest.mark.parametrize("state", [State.SLEEPING, State.STOPPED, State.FAILED, State.DRAINING])
async def test_an_engine_that_did_not_run_is_not_started_by_cooling(state: State) -> None:
    model = Model(state)
    seen = handle_of(model)
    limit(seen, DRAIN)
    limit(seen, OPEN)
    assert model.calls == []


async def test_one_that_shall_follow_is_stopped_too() -> None:
    """A reload's new engine starts beside the one that serves."""
    model = Model()
    seen = handle_of(model)
    new = Model(State.LOADING)
    seen.supervisor_changed(new.supervisor, State.LOADING)
    limit(seen, DRAIN)
    assert (model.calls, new.calls) == (["stop"], ["stop"])


async def test_a_model_that_failed_meanwhile_is_not_started_by_cooling() -> None:
    model = Model()
    seen = handle_of(model)
    limit(seen, DRAIN)
    model.become(State.FAILED)
    limit(seen, OPEN)
    assert model.calls == ["stop"]


async def test_who_waits_for_a_model_that_is_removed_is_told() -> None:
    seen = handle_of(Model())
    limit(seen, DRAIN)
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    seen.remove()
    status = await waiting
    assert (status.state, status.failure and status.failure.kind) == (State.FAILED, "removed")


def hot(rig: Rig) -> ModelHandle:
    """The rig's supervisor behind a handle that learns of its changes."""
    seen = ModelHandle("chat", supervisor=rig.supervisor)

    def became(supervisor: Supervisor, before: SupervisorState, after: SupervisorState) -> None:
        rig.machines.append(after)
        if after.state is not before.state:
            seen.supervisor_changed(supervisor, after.state)

    rig.supervisor.callbacks = replace(rig.supervisor.callbacks, on_change=became)
    return seen


async def cools(rig: Rig, seen: ModelHandle) -> None:
    """Expect it stopped, with the reason and without a child; then cool down and expect it to serve."""
    await rig.settle(State.STOPPED)
    assert seen.status().pid is None
    failure = seen.status().failure
    assert failure is not None and failure.kind == "too_hot"
    limit(seen, OPEN)
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
        limit(seen, DRAIN)
        await cools(rig, seen)
        assert rig.states.count("READY") == 2


async def test_a_restart_while_it_is_too_hot(tmp_path: Path) -> None:
    async with rigged(tmp_path, start=False) as rig:
        seen = hot(rig)
        rig.supervisor.start()
        await rig.ready()
        limit(seen, DRAIN)
        await rig.settle(State.STOPPED)
        rig.supervisor.restart()
        await rig.until(lambda: rig.states.count("STARTING") == 2)
        await cools(rig, seen)
        assert rig.states.count("READY") == 2


async def test_a_crash_when_it_gets_too_hot(tmp_path: Path) -> None:
    """In BACKOFF nothing runs, and nothing may start when it is over."""
    terms = SupervisorOptions(policy=replace(FAST, backoff_s=(60,)))
    async with rigged(tmp_path, start=False, terms=terms) as rig:
        seen = hot(rig)
        rig.supervisor.start()
        await rig.ready()
        os.kill(rig.pids[-1], signal.SIGKILL)
        await rig.settle(State.BACKOFF)
        limit(seen, DRAIN)
        await cools(rig, seen)
        assert rig.states.count("STARTING") == 2


async def test_a_start_while_it_is_too_hot(tmp_path: Path) -> None:
    """A model that was added, or arrived."""
    async with rigged(tmp_path, start=False) as rig:
        seen = hot(rig)
        limit(seen, DRAIN)
        rig.supervisor.start()
        await rig.until(lambda: "STARTING" in rig.states)
        await cools(rig, seen)


async def test_who_makes_place_for_another_is_not_started_again(tmp_path: Path) -> None:
    """Cool again, or restarted, while a reload waits for its end: the reload does not wait without end."""
    async with rigged(tmp_path) as rig:
        await rig.ready()
        handle = ModelHandle("chat", supervisor=rig.supervisor)
        new = Supervisor(
            rig.supervisor.model, tmp_path / "n.sock", PATTERNS, SupervisorOptions(policy=FAST, preload=False)
        )
        owner = asyncio.create_task(new.run())
        with rig.supervisor.traffic.request():  # it drains for as long as this is open
            turning = asyncio.create_task(while_asleep(handle, rig.supervisor, new))
            await rig.settle(State.DRAINING)
            rig.supervisor.restart()
            await settle()
            assert rig.supervisor.machine.then is AfterExit.HOME
        await asyncio.wait_for(turning, PATIENCE_S)
        assert rig.supervisor.machine.state is State.STOPPED
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)


@pytest.mark.parametrize(("turn", "how", "kind"), [("beside", "back", "stopped"), ("after", "after", None)])
async def test_a_reload_whose_new_engine_is_stopped_for_heat(
    tmp_path: Path, turn: str, how: str, kind: str | None
) -> None:
    """Beside the old engine nothing has changed, and the reason is given; in place the new engine stays."""
    async with rigged(tmp_path) as rig:
        await rig.ready()
        handle = ModelHandle("chat", supervisor=rig.supervisor)
        hot = SupervisorCallbacks(
            on_change=lambda new, before, after: new.stop() if after.state is State.STARTING else None
        )
        new = Supervisor(rig.supervisor.model, tmp_path / "n.sock", PATTERNS, SupervisorOptions(policy=FAST), hot)
        owner = asyncio.create_task(new.run())
        old = rig.supervisor
        turning = blue_green(handle, old, new) if turn == "beside" else in_place(handle, old, new)
        turned = await asyncio.wait_for(turning, PATIENCE_S)
        assert (turned.how, turned.failure and turned.failure.kind) == (how, kind)
        assert handle.supervisor is (rig.supervisor if turn == "beside" else new)
        assert new.machine.state is State.STOPPED
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)


async def test_who_leaves_while_waiting_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    seen = handle_of(Model(State.LOADING))
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await settle()
    assert asyncio.all_tasks() == before


async def test_requests_of_a_placeholder_move_to_the_planned_model() -> None:
    seen = ModelHandle("model", ("m",), pending=Failure("model_missing", "no such file", "pull it"))
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    status = seen.status()
    assert (status.state, status.failure and status.failure.kind) == (State.STARTING, "model_missing")
    assert (seen.model_id, seen.aliases, seen.slots, seen.endpoint()) == ("model", ("m",), 1, None)
    with seen.request() as progress:
        progress.moved()
    model = Model(State.LOADING)
    seen.serve(model.supervisor)
    await settle()
    assert not waiting.done() and seen.model_id == "chat"
    model.become(State.READY)
    assert (await waiting).state is State.READY


async def test_a_placeholder_that_failed_answers_until_a_plan_comes() -> None:
    seen = ModelHandle("chat")
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    seen.fail(Failure("does_not_fit", "9 GiB", "a smaller one"))
    assert (await waiting).state is State.FAILED
    assert (await seen.ensure_ready()).state is State.FAILED
    seen.serve(Model().supervisor)
    assert (await seen.ensure_ready()).state is State.READY


async def test_requests_wait_through_a_replacement_whatever_becomes_of_the_old_engine() -> None:
    old, new = Model(), Model(State.LOADING)
    seen = handle_of(old)
    with seen.replacing():
        waiting = asyncio.create_task(seen.ensure_ready())
        old.become(State.STOPPED)
        await settle()
        assert not waiting.done()
        seen.serve(new.supervisor)
    await settle()
    assert not waiting.done()
    new.become(State.READY)
    assert (await waiting).state is State.READY


async def test_a_model_that_fails_while_it_is_too_hot_wakes_its_waiters() -> None:
    model = Model(State.LOADING)
    seen = handle_of(model)
    limit(seen, DRAIN)
    waiting = asyncio.create_task(seen.ensure_ready())
    await settle()
    model.become(State.FAILED)
    seen.supervisor_changed(model.supervisor, State.FAILED)
    assert (await waiting).state is State.FAILED


def test_without_a_supervisor_the_drivers_gate_names_the_missing_gpu() -> None:
    missing = Failure("device_missing", "no device node\n/etc/systemd/system/edgellm.service.d/x.conf", "wait")
    waiting = ModelHandle("chat", pending=missing)
    assert waiting.status().gates == {"driver": Gate(evidence="no device node")}
    waiting.fail(Failure("model_missing", "no such file", "pull it"))
    assert waiting.status().gates == {}
    waiting.fail(missing)
    assert (waiting.status().state, list(waiting.status().gates)) == (State.FAILED, ["driver"])


@pytest.mark.parametrize(("layers", "in_vram"), [(0, 0), (-1, 0), (29, 900), (99, 900), (14, 900 * 14 // 29)])
def test_the_bytes_on_a_gpu_follow_the_layers_of_the_plan(layers: int, in_vram: int) -> None:
    it = model_plan((), chosen=settings(n_gpu_layers=layers))
    assert model_info(it, it.ladder.plans[0])["size_vram"] // MIB == in_vram
