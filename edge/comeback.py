"""Served by the CPU although the profile wants the GPU: looks for it again, ever more seldom, and goes back to it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from edge.board.probe import probe
from edge.board.visible import VARIABLE, visible
from edge.engine.inspect import run_probe
from edge.engine.readout import parse_devices
from edge.errors import EdgeError
from edge.fleet import Fleet
from edge.prepare import Prepared, wants_gpu
from edge.status import State
from edge.supervisor import devices
from edge.supervisor.events import DeviceBack
from edge.terms import without_device

log = logging.getLogger(__name__)

PAUSES_S = (30.0, 60.0, 120.0, 300.0)  # a look starts the engine for a moment
DEVICES_TIMEOUT_S = 90.0


async def come_back(
    prepared: Callable[[], Prepared | None],
    fleet: Fleet,
    plan_again: Callable[[], Awaitable[Any]],
    *,
    answers: Callable[[Prepared], bool] | None = None,
    pauses_s: Sequence[float] = PAUSES_S,
) -> None:
    """Until cancelled. A model that lost its GPU is restarted on it; one that was planned without is planned again."""
    looks, said = 0, ""
    while True:
        await asyncio.sleep(pauses_s[min(looks, len(pauses_s) - 1)])
        current = prepared()
        lost = [each for each in fleet.supervisors() if each.on_cpu_instead and each.machine.state is State.READY]
        absent = current is not None and planned_without(current)
        if current is None or not (lost or absent):
            looks = 0
            continue
        looks += 1
        try:
            back = await asyncio.to_thread(answers or gpu_answers, current)
        except Exception as error:  # a look at a driver that is not well: the next one may go better
            why = f"{type(error).__name__}: {error}"
            if why != said:
                log.warning("whether the GPU is back cannot be seen: %s", why)
            said = why
            continue
        if back:
            for each in lost:
                each.post(DeviceBack())
            if absent:
                await plan_again()


def planned_without(prepared: Prepared) -> bool:
    """The profile wants the GPU, this engine could use it, and the plan does without."""
    if not wants_gpu(prepared.profile) or not prepared.plan.engine.cuda:
        return False
    ladders = [model.ladder for model in prepared.plan.models.values()]
    return any(without_device(prepared, ladder.plans[ladder.chosen]) for ladder in ladders)


def gpu_answers(prepared: Prepared) -> bool:
    """Its nodes open and the engine lists it. Blocking; a start of the engine."""
    board, engine = visible(probe(), os.environ.get(VARIABLE)), prepared.plan.engine
    if board.refused is not None or not engine.cuda or not devices.look(board).ready:
        return False
    if not engine.has("--list-devices"):
        return True
    try:
        told = run_probe(Path(engine.path), ["--list-devices"], engine.library_path, timeout_s=DEVICES_TIMEOUT_S)
    except EdgeError:
        return False
    return bool(parse_devices(told.stdout + told.stderr))
