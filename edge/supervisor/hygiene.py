"""Limits that keep an engine from starving the rest of the machine. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from edge.profile.profile import Wishes


@dataclass(frozen=True, slots=True)
class Hygiene:
    """Limits of an engine process. `cpus` empty: those that this process may use."""

    nice: int = 0
    # proc(5): -1000…1000 is added to the badness. 500 makes the kernel choose the engine, which is restarted, before
    # sshd or this process.
    oom_score_adj: int = 500
    cpus: tuple[int, ...] = ()


def hygiene(wishes: Wishes) -> Hygiene:
    """Return the limits that a preset requests."""
    return Hygiene(wishes.nice, wishes.oom_score_adj, wishes.cpus)
