"""What a request's work at the engine cost in joules."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from edge.gateway.visit import Visit
from edge.telemetry.energy import EnergyMeter


@contextmanager
def measured(meter: EnergyMeter | None, visit: Visit, model: str) -> Iterator[None]:
    """From the request's turn to the end of its answer; the estimate is left in the visit.

    While a stream runs its chunks stand for tokens, so that requests side by side share the energy as they work.
    """
    if meter is None:
        yield
        return
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    tally = visit.tally
    work = meter.begin(began_s, model, (lambda: tally.chunks) if tally is not None else None)
    try:
        yield
    except BaseException:
        meter.cancel(work, loop.time())
        raise
    tokens = tally.tokens().completion if tally is not None else None
    visit.joules = meter.request(began_s, loop.time(), tokens or 0, work)
