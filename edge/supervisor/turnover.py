"""Replace one supervisor of a model by another; if the new one fails, the old one serves on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edge.status import Failure, State
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.state import LIVE
from edge.supervisor.supervisor import Supervisor

ROOM_S = 5.0  # the CUDA driver gives a dead process's memory back within a second
ROOM_LOOK_S = 0.1
_GONE = (State.STOPPED, State.FAILED)
_STOPPED = Failure(
    "stopped", "the new engine was stopped while it started: the board is too hot", "reload once it is cool"
)


@dataclass(frozen=True, slots=True)
class Turned:
    """The outcome of a replacement. `how`: beside | after | asleep | back. `failure`: why the new one is not used."""

    how: str
    failure: Failure | None = None


async def blue_green(handle: ModelHandle, old: Supervisor, new: Supervisor) -> Turned:
    """Start the new engine while the old one serves, then switch."""
    state = await new.start_and_settle()
    if state is not State.READY:
        return Turned("back", _STOPPED if state is State.STOPPED else new.machine.failure)
    handle.serve(new)
    await _stop(old)
    return Turned("beside")


async def in_place(
    handle: ModelHandle, old: Supervisor, new: Supervisor, room: Callable[[], Awaitable[bool]]
) -> Turned:
    """Finish open requests on the old engine, stop it, start the new one; on failure start the old one again.

    A new engine that is stopped from outside (the board is too hot) has not failed: it stays in place and starts later.
    """
    served = old.machine.state is not State.FAILED
    with handle.replacing():
        await _stop(old)
        await _until(room)
        handle.serve(new)
        if await new.start_and_settle() is not State.FAILED:
            return Turned("after")
        failure = new.machine.failure
        if not served:  # the old engine had failed too: its replacement shows the newer failure
            return Turned("after", failure)
        handle.serve(old)
        await old.start_and_settle()
        return Turned("back", failure)


async def while_asleep(handle: ModelHandle, old: Supervisor, new: Supervisor) -> Turned:
    """Replace a sleeping model's supervisor without waking it."""
    with handle.replacing():
        await _stop(old)
        handle.serve(new)
    return Turned("asleep")


async def _stop(supervisor: Supervisor) -> None:
    """Stop it until it stays stopped: a restart, or a board that cooled down, may start it meanwhile."""
    while True:
        supervisor.stop()
        await supervisor.settled(State.DRAINING, State.STOPPING, *_GONE)
        if await supervisor.settled(*_GONE, State.BACKOFF, *LIVE) in _GONE:
            return


async def _until(room: Callable[[], Awaitable[bool]]) -> None:
    """Wait at most ROOM_S for the memory to be free; after that the new engine's own failure decides."""
    end_s = time.monotonic() + ROOM_S
    while not await room() and time.monotonic() < end_s:
        await asyncio.sleep(ROOM_LOOK_S)
