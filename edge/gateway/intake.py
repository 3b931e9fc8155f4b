"""Acquire an engine's slot for a request: wait for the model, then in the queue, reading the body meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from edge.gateway.admission import Admission, Turn
from edge.gateway.hold import WaitingRoom, failed_fault
from edge.gateway.proxy import Exchange
from edge.gateway.refused import Refused
from edge.status import State
from edge.upstream import Endpoint


@asynccontextmanager
async def acquire_slot(
    waiting: WaitingRoom, admission: Admission, exchange: Exchange, *, slot: bool
) -> AsyncIterator[Endpoint]:
    """Yield an endpoint that can be used now. `slot`: the request runs inference. Raises RejectedError."""
    upstream = exchange.upstream
    endpoint = upstream.endpoint()
    if endpoint is not None and not slot:
        yield endpoint
        return
    lease: Turn | None = None if endpoint is None else admission.enter_now(upstream)
    try:
        if endpoint is None or lease is None:
            status = upstream.status()
            if status.state is State.FAILED:
                raise Refused(failed_fault(status))
            with waiting.ticket(upstream, exchange.body, exchange.reserved, exchange.wait_until_s) as ticket:
                if endpoint is None:
                    await ticket.endpoint()
                if slot:
                    lease = await admission.enter(upstream, ticket.wait, patient=endpoint is None)
                # The engine may have been replaced while the request was queued.
                endpoint = upstream.endpoint() or await ticket.endpoint()
                await ticket.body_read()
        yield endpoint
    finally:
        if lease is not None:
            lease.leave()
