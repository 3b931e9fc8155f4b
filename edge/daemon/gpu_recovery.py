"""Return to the GPU after serving by the CPU in its place: retry at growing intervals, reload when it is usable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from edge.board import device_nodes
from edge.board.board import only_gpus
from edge.board.probe import probe
from edge.daemon.fleet import Fleet, without_device
from edge.engine.inspect import run_probe
from edge.engine.output import parse_devices
from edge.errors import EdgeError
from edge.plan.prepare import Prepared, wants_gpu
from edge.supervisor.events import DeviceBack
from edge.supervisor.status import State
from edge.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

PAUSES_S = (30.0, 60.0, 120.0, 300.0)  # each look starts the engine for a moment, which costs seconds of CPU
DEVICES_TIMEOUT_S = 90.0  # the first CUDA calls after a cold boot have taken that long (llama.cpp#27923)


async def recover_gpu(
    prepared: Callable[[], Prepared | None],
    fleet: Fleet,
    plan_again: Callable[[], Awaitable[Any]],
    *,
    answers: Callable[[Prepared], bool] | None = None,
    pauses_s: Sequence[float] = PAUSES_S,
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
            back = await asyncio.to_thread(answers or gpu_answers, current)
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
    """Return whether it serves without its GPU; a lost rpc-server is the matter of remote_recovery."""
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
