"""Compare the memory of a serving engine with its plan. Pure."""

from __future__ import annotations

from edge.linux.procfs import ProcessUsage
from edge.plan.plan import LaunchPlan
from edge.status import Degraded
from edge.units import MIB, format_bytes

# Estimates of compute buffers are off by up to a quarter; on small models a fixed amount (libraries, threads) is more.
GROWN_RATIO = 1.25
GROWN_BYTES = 256 * MIB
SWAPPED_BYTES = 64 * MIB  # less is pages of the start that are not used again


def grown(plan: LaunchPlan, vitals: ProcessUsage | None) -> tuple[Degraded, ...]:
    """Return growth and swapping as degradations, by the process's anonymous memory and swap.

    On a Jetson the kernel does not count GPU allocations for the process (FC-20).
    """
    domain = plan.budget.get("unified") or plan.budget.get("host")
    if vitals is None or domain is None:
        return ()
    found: list[Degraded] = []
    planned, taken = domain.required_bytes, vitals.rss_anon_bytes + vitals.swap_bytes
    if taken > planned * GROWN_RATIO + GROWN_BYTES:
        because = "the engine grew past its plan: prompt cache, checkpoints or a leak"
        found.append(Degraded("memory", format_bytes(planned), format_bytes(taken), because))
    if vitals.swap_bytes > SWAPPED_BYTES:
        got = format_bytes(vitals.swap_bytes)
        found.append(Degraded("swap", "none", got, "memory is short, and the engine slow: end other programs"))
    return tuple(found)
