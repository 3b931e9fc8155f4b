"""How gently an engine runs beside the rest of the machine. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from edge.profile.profile import Wishes


@dataclass(frozen=True, slots=True)
class Hygiene:
    """`cpus` empty: all that we may use ourselves."""

    nice: int = 0
    oom_score_adj: int = 500
    cpus: tuple[int, ...] = ()


def hygiene(wishes: Wishes) -> Hygiene:
    return Hygiene(wishes.nice, wishes.oom_score_adj, wishes.cpus)
