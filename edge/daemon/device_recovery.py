"""Return to a GPU or to rpc-servers that models lost: look at growing intervals, restart or plan again once usable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edge.board import device_nodes
from edge.board.board import only_gpus
from edge.board.probe import probe
from edge.daemon.fleet import Fleet, without_device
from edge.engine.inspect import run_probe
from edge.engine.output import parse_devices
from edge.errors import EdgeError
from edge.linux.rpc import reachable
from edge.linux.timeouts import in_thread
from edge.plan.prepare import Prepared, wants_gpu
from edge.supervisor.events import DeviceBack
from edge.supervisor.status import State
from edge.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

GPU_PAUSES_S = (30.0, 60.0, 120.0, 300.0)  # each look starts the engine for a moment, which costs seconds of CPU
SERVER_PAUSES_S = (5.0, 10.0, 30.0)  # a look is one TCP connection; a board boots in about half a minute
DEVICES_TIMEOUT_S = 90.0  # the first CUDA calls after a cold boot have taken that long (llama.cpp#27923)


async def recover_devices(
    prepared: Callable[[], Prepared | None], fleet: Fleet, plan_again: Callable[[], Awaitable[Any]]
) -> None:
    """Run until cancelled: bring models back to a GPU or to rpc-servers that they lost."""
    await asyncio.gather(
        recover_gpu(prepared, fleet, plan_again),
        recover_servers(prepared, fleet, plan_again),
    )


async def recover_gpu(
    prepared: Callable[[], Prepared | None],
    fleet: Fleet,
    plan_again: Callable[[], Awaitable[Any]],
    *,
    answers: Callable[[Prepared], bool] | None = None,
    pauses_s: Sequence[float] = GPU_PAUSES_S,
) -> None:
    """Run until cancelled: restart models that lost the GPU on it, and call `plan_again` if the plan is without it."""
    looks, logged = 0, ""
    while True:
        await asyncio.sleep(pauses_s[min(looks, len(pauses_s) - 1)])
        current = prepared()
        lost = [each for each in fleet.supervisors() if _lost_gpu(each)]
        absent = current is not None and planned_without_gpu(current)
        if current is None or not (lost or absent):
            looks = 0
            continue
        looks += 1
        try:
            back = await in_thread(partial(answers or gpu_answers, current), None)
        except Exception as error:  # a driver in trouble can fail in any way; the next look may succeed
            why = f"{type(error).__name__}: {error}"
            if why != logged:
                log.warning("cannot check whether the GPU is back: %s", why)
            logged = why
            continue
        if back:
            for each in lost:
                each.post(DeviceBack())
            if absent:
                await plan_again()


def _lost_gpu(supervisor: Supervisor) -> bool:
    """Return whether it serves without its GPU; a lost rpc-server is the matter of recover_servers."""
    home = supervisor.model.ladder.plans[supervisor.machine.home]
    return supervisor.on_cpu_instead and supervisor.machine.state is State.READY and not home.settings.rpc


def planned_without_gpu(prepared: Prepared) -> bool:
    """Return whether profile and engine would use the GPU, and the plan is for the CPU."""
    if not wants_gpu(prepared.profile) or not prepared.plan.engine.cuda:
        return False
    ladders = [model.ladder for model in prepared.plan.models.values()]
    return any(without_device(prepared, ladder.plans[ladder.chosen]) for ladder in ladders)


def gpu_answers(prepared: Prepared) -> bool:
    """Return whether the GPU's nodes open and the engine lists it. Blocking: starts the engine."""
    board, engine = only_gpus(probe(), prepared.profile.preset.gpus), prepared.plan.engine
    if board.refused is not None or not engine.cuda or not device_nodes.check_nodes(board).ready:
        return False
    if not engine.has("--list-devices"):
        return True
    try:
        listed = run_probe(Path(engine.path), ["--list-devices"], engine.library_path, timeout_s=DEVICES_TIMEOUT_S)
    except EdgeError:
        return False
    return bool(parse_devices(listed.stdout + listed.stderr))


async def recover_servers(
    prepared: Callable[[], Prepared | None],
    fleet: Fleet,
    plan_again: Callable[[], Awaitable[Any]],
    *,
    answers: Callable[[str], bool] = reachable,
    pauses_s: Sequence[float] = SERVER_PAUSES_S,
) -> None:
    """Run until cancelled. `plan_again` is called once a server answers that the plan was made without."""
    looks = 0
    while True:
        await asyncio.sleep(pauses_s[min(looks, len(pauses_s) - 1)])
        current = prepared()
        lost = [each for each in fleet.supervisors() if servers_lost(each)]
        absent = current.absent if current is not None else ()
        looks = looks + 1 if lost or absent else 0
        for each in lost:
            if await _all_answer(planned_servers(each), answers):
                log.info("%s: every rpc-server answers again", each.model.id)
                if each.machine.state is State.FAILED:
                    fleet.handles[each.model_id].start()
                else:
                    each.post(DeviceBack())
        if absent and await _all_answer([absent[0].endpoint], answers):
            await plan_again()


def planned_servers(supervisor: Supervisor) -> tuple[str, ...]:
    """Return the rpc-servers of the planned rung."""
    ladder = supervisor.model.ladder
    return ladder.plans[supervisor.machine.home].settings.rpc


def servers_lost(supervisor: Supervisor) -> bool:
    """Return whether a model serves without its rpc-servers, or failed because one is gone."""
    machine = supervisor.machine
    if not planned_servers(supervisor):
        return False
    if machine.state is State.FAILED:
        kind = machine.failure.kind if machine.failure is not None else ""
        return kind.startswith("remote_") or kind == "does_not_fit"
    return supervisor.on_cpu_instead and machine.state is State.READY


async def _all_answer(endpoints: Sequence[str], answers: Callable[[str], bool]) -> bool:
    return all([await in_thread(partial(answers, endpoint), None) for endpoint in endpoints])
