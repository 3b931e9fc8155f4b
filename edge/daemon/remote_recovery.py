"""Return to a plan with layers on other boards: look for lost rpc-servers, restart models when all answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from edge.daemon.fleet import Fleet
from edge.daemon.gpu_recovery import recover_gpu
from edge.linux.rpc import reachable
from edge.plan.prepare import Prepared
from edge.supervisor.events import DeviceBack
from edge.supervisor.status import State
from edge.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

PAUSES_S = (5.0, 10.0, 30.0)  # a look is one TCP connection; a board boots in about half a minute


async def recover_devices(
    prepared: Callable[[], Prepared | None], fleet: Fleet, plan_again: Callable[[], Awaitable[Any]]
) -> None:
    """Run until cancelled: bring models back to a GPU or to rpc-servers that they lost."""
    await asyncio.gather(
        recover_gpu(prepared, fleet, plan_again),
        recover_servers(prepared, fleet, plan_again),
    )


async def recover_servers(
    prepared: Callable[[], Prepared | None],
    fleet: Fleet,
    plan_again: Callable[[], Awaitable[Any]],
    *,
    answers: Callable[[str], bool] = reachable,
    pauses_s: Sequence[float] = PAUSES_S,
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
                    each.start()
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
    return all([await asyncio.to_thread(answers, endpoint) for endpoint in endpoints])
