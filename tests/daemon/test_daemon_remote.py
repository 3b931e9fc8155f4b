"""A model that lost its rpc-server: a smaller plan, or waiting, and the way back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from edge.config.devices import DeviceConfig
from edge.config.values import Config
from edge.daemon.device_recovery import recover_servers, servers_lost
from edge.daemon.fleet import Fleet, may_do_without, policy_of, without_absent
from edge.errors import DoesNotFitError
from edge.plan.plan import LaunchPlan
from edge.plan.prepare import Prepared
from edge.plan.remotes import Absent
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.status import State
from edge.supervisor.supervisor import SupervisorCallbacks
from tests.fakes.llama_switches import argv
from tests.supervisor.rig import gpu_settings, launch_plan, rigged, settings

FIRST, SECOND = "127.0.0.1:50052", "127.0.0.1:50053"
REMOTE = gpu_settings("RPC0", rpc=(FIRST,))
LOST = {
    "at": "loading",
    "lines": [f"/s/ggml-rpc.cpp:547: Failed to connect to {FIRST}"],
    "signal": int(signal.SIGABRT),
}


def prepared(*devices: DeviceConfig, absent: tuple[Absent, ...] = ()) -> Prepared:
    """Only what is read here."""
    none = cast(Any, None)
    return Prepared(Config(devices=devices), none, none, none, absent=absent)


def ship(*supervisors: Any) -> Fleet:
    class Few:
        def __init__(self) -> None:
            self.handles = {each.model_id: ModelHandle(each.model_id, supervisor=each) for each in supervisors}

        def supervisors(self) -> list[Any]:
            return list(supervisors)

    return cast(Fleet, Few())


async def nothing() -> None:
    """Plan nothing."""


async def test_it_serves_alone_and_returns_when_the_server_answers(short_dir: Path) -> None:
    command = argv(short_dir / "fake", gpu={"RPC0": FIRST}, death=LOST)
    alone = argv(short_dir / "alone")
    callbacks = SupervisorCallbacks(cpu=lambda: launch_plan(alone, 0, settings()))
    async with rigged(short_dir, argv=command, chosen=REMOTE, callbacks=callbacks) as rig:
        await rig.ready()
        assert servers_lost(rig.supervisor) and "remote_missing" in rig.kinds
        (degraded,) = [each for each in rig.supervisor.status().degraded if each.subject == "rpc"]
        assert degraded.got == "this board alone"
        rig.change(death=None)
        asked: list[str] = []

        def answers(endpoint: str) -> bool:
            asked.append(endpoint)
            return len(asked) > 1

        watching = asyncio.create_task(
            recover_servers(prepared, ship(rig.supervisor), nothing, answers=answers, pauses_s=(0.05,))
        )
        try:
            await rig.until(lambda: rig.supervisor.machine.rung == 0 and rig.states[-1] == "READY")
        finally:
            watching.cancel()
        assert set(asked) == {FIRST} and not servers_lost(rig.supervisor)
        assert rig.supervisor.status().gates["weights"].devices["RPC0"].ready


async def test_where_no_smaller_plan_fits_it_fails_by_name_and_comes_back(short_dir: Path) -> None:
    def too_large() -> LaunchPlan:
        raise DoesNotFitError("chat does not fit", "a smaller model")

    command = argv(short_dir / "fake", gpu={"RPC0": FIRST}, death=LOST)
    callbacks = SupervisorCallbacks(cpu=too_large)
    async with rigged(short_dir, argv=command, chosen=REMOTE, callbacks=callbacks) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert rig.kinds[-1] == "does_not_fit" and servers_lost(rig.supervisor)
        rig.change(death=None)
        watching = asyncio.create_task(
            recover_servers(prepared, ship(rig.supervisor), nothing, answers=lambda _: True, pauses_s=(0.05,))
        )
        try:
            await rig.until(lambda: rig.states[-1] == "READY")
        finally:
            watching.cancel()


async def test_a_plan_without_a_server_is_made_again_when_it_answers() -> None:
    again = asyncio.Event()
    current = prepared(absent=(Absent(FIRST, "no route"),))

    async def plan_again() -> None:
        again.set()

    for answer in (False, True):
        watching = asyncio.create_task(
            recover_servers(lambda: current, ship(), plan_again, answers=lambda _, now=answer: now, pauses_s=(0.01,))  # type: ignore[misc]
        )
        await (asyncio.wait_for(again.wait(), 60) if answer else asyncio.sleep(0.2))
        watching.cancel()
        assert again.is_set() == answer
    assert [(each.subject, each.wanted) for each in without_absent(current)] == [("rpc", FIRST)]


@pytest.mark.parametrize(
    ("first", "second", "without"),
    [("without", "without", True), ("wait", "wait", False), ("without", "wait", False)],
)
def test_every_used_server_has_to_allow_a_plan_without_it(first: Any, second: Any, without: bool) -> None:
    made = prepared(DeviceConfig(FIRST, absent=first), DeviceConfig(SECOND, absent=second))
    plan = launch_plan(("x",), 0, replace(REMOTE, rpc=(FIRST, SECOND)))
    assert may_do_without(made, plan) is without
    waits = policy_of(made, plan).device_attempts > 1000
    assert waits is not without
    assert policy_of(made, launch_plan(("x",), 0, settings())).device_attempts == made.config.restart.device_attempts
