"""One supervisor takes another's place: beside it where both fit, after it where not. What fails changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from edge.status import Failure, State
from edge.supervisor.slot import Slot
from edge.supervisor.state import LIVE
from edge.supervisor.supervisor import Supervisor

ROOM_S = 5.0  # a driver gives a dead process's memory back within a second
ROOM_LOOK_S = 0.1
_GONE = (State.STOPPED, State.FAILED)
_STOPPED = Failure(
    "stopped", "the new engine was stopped while it started: the board is too hot", "reload once it is cool"
)


@dataclass(frozen=True, slots=True)
class Turned:
    """`how`: beside | after | asleep | back. `failure`: why the new one does not serve."""

    how: str
    failure: Failure | None = None


async def beside(slot: Slot, new: Supervisor) -> Turned:
    """The old one serves until the new one is READY."""
    state = await new.risen()
    if state is not State.READY:
        return Turned("back", _STOPPED if state is State.STOPPED else new.machine.failure)
    old, slot.supervisor = slot.supervisor, new
    await _ended(old)
    return Turned("beside")


async def after(slot: Slot, new: Supervisor, room: Callable[[], Awaitable[bool]]) -> Turned:
    """Open requests finish on the old one, new ones wait for the new one. If that fails, the old one serves again.

    A new one that somebody stops (the board is too hot) has not failed: it keeps the place, and is started later.
    """
    old = slot.supervisor
    served = old.machine.state is not State.FAILED
    with slot.turning():
        await _ended(old)
        await _until(room)
        slot.supervisor = new
        if await new.risen() is not State.FAILED:
            return Turned("after")
        failure = new.machine.failure
        if not served:  # there is nothing to go back to: who asks shall hear of the newer fault
            return Turned("after", failure)
        slot.supervisor = old
        await old.risen()
        return Turned("back", failure)


async def quietly(slot: Slot, new: Supervisor) -> Turned:
    """A sleeping model goes on sleeping."""
    with slot.turning():
        await _ended(slot.supervisor)
        slot.supervisor = new
    return Turned("asleep")


async def _ended(supervisor: Supervisor) -> None:
    """Whoever starts it meanwhile (a restart, a board that is cool again) is overruled: another takes its place."""
    while True:
        supervisor.stop()
        await supervisor.settled(State.DRAINING, State.STOPPING, *_GONE)
        if await supervisor.settled(*_GONE, State.BACKOFF, *LIVE) in _GONE:
            return


async def _until(room: Callable[[], Awaitable[bool]]) -> None:
    """Waits for the memory to come back; the new engine's own refusal is the last word."""
    end_s = time.monotonic() + ROOM_S
    while not await room() and time.monotonic() < end_s:
        await asyncio.sleep(ROOM_LOOK_S)
