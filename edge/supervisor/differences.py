"""Differences from the request that are known when a child is spawned. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from edge.status import Degraded, Failure
from edge.supervisor.state import Machine
from edge.supervisor.terms import Terms


def before_start(terms: Terms, machine: Machine, missing: Failure | None) -> tuple[Degraded, ...]:
    """Return what is degraded before the start. `missing`: why the GPU is not used although the plan needs it."""
    return (*terms.known, *_of(machine, missing))


def _of(machine: Machine, missing: Failure | None) -> Iterator[Degraded]:
    if missing is not None:
        yield Degraded("device", "GPU", "CPU", f"{missing.kind}: {missing.hint}")
    if machine.safe_mode:
        yield Degraded("accelerations", "on", "off", "it crashed twice in a row while starting with them")
