"""The doctor: facts in, findings out. Pure; gather/ reads the facts."""

from __future__ import annotations

from collections.abc import Callable

from edge.doctor.check import Check
from edge.doctor.checks import board, config, engine, gpu, memory, power, service, storage, tidy, wsl
from edge.doctor.facts import Facts

Found = Check | None | tuple[Check, ...]

CHECKS: tuple[Callable[[Facts], Found], ...] = (
    *board.CHECKS,
    *config.CHECKS,
    *memory.CHECKS,
    *gpu.CHECKS,
    *engine.CHECKS,
    *power.CHECKS,
    *storage.CHECKS,
    *service.CHECKS,
    *wsl.CHECKS,
    *tidy.CHECKS,
)


def examine(facts: Facts) -> tuple[Check, ...]:
    """Every check that means something here, in order."""
    findings: list[Check] = []
    for check in CHECKS:
        found = check(facts)
        if isinstance(found, Check):
            findings.append(found)
        elif found is not None:
            findings.extend(found)
    return tuple(findings)
