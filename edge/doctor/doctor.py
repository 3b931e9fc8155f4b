"""The list of checks of `edgellm doctor`, run over facts that were read before. Pure."""

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
    """Run every check that applies to this machine, in order."""
    findings: list[Check] = []
    for check in CHECKS:
        found = check(facts)
        if isinstance(found, Check):
            findings.append(found)
        elif found is not None:
            findings.extend(found)
    return tuple(findings)
