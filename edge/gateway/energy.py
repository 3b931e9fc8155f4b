"""Estimate the joules that a request's work at the engine took."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from edge.gateway.visit import Visit
from edge.telemetry.energy import EnergyMeter


@contextmanager
def measured(meter: EnergyMeter | None, record: Visit, model: str) -> Iterator[None]:
    """Write the estimate from the request's slot to the end of its answer into `record.joules`.

    While a stream runs its chunks stand for tokens, so that parallel requests share the energy by their work.
    """
    if meter is None:
        yield
        return
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    usage = record.usage
    work = meter.begin(began_s, model, (lambda: usage.chunks) if usage is not None else None)
    try:
        yield
    except BaseException:
        meter.cancel(work, loop.time())
        raise
    tokens = usage.tokens().completion if usage is not None else None
    record.joules = meter.request(began_s, loop.time(), tokens or 0, work)
