"""From a request to its turn at an engine: wait for the model, then in line, reading the body meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edge.gateway.admission import Admission, Turn
from edge.gateway.body import Body
from edge.gateway.hold import Kept, Seat, WaitingRoom, failed
from edge.gateway.refused import Refused
from edge.status import State
from edge.upstream import Endpoint, Upstream


@asynccontextmanager
async def turn(
    room: WaitingRoom, admission: Admission, upstream: Upstream, body: Body, kept: Kept, *, until_s: float, slot: bool
) -> AsyncIterator[Endpoint]:
    """An endpoint to send to now. `slot`: the request makes the model work, so it needs a slot. Raises Refused.

    `kept` outlives the turn: what was read of the body meanwhile is in memory until the answer has ended.
    """
    endpoint = upstream.endpoint()
    taken: Turn | None = None
    if endpoint is not None:
        if not slot:
            yield endpoint
            return
        taken = admission.enter_now(upstream)
    try:
        if endpoint is None or taken is None:
            status = upstream.status()
            if status.state is State.FAILED:
                raise Refused(failed(status))
            with room.seat(upstream, body, kept, until_s) as seat:
                early = endpoint is None
                endpoint = await _ready(upstream, seat)
                if slot:
                    taken = await admission.enter(upstream, seat.wait, patient=early)
                    endpoint = await _ready(upstream, seat)  # it may have been replaced while we stood in line
                await seat.body_read()
        yield endpoint
    finally:
        if taken is not None:
            taken.leave()


async def _ready(upstream: Upstream, seat: Seat) -> Endpoint:
    return upstream.endpoint() or await seat.endpoint()
