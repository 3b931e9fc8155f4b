"""What holds for every child of one model. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.status import Degraded
from edge.supervisor.hygiene import Hygiene
from edge.supervisor.policy import Policy


@dataclass(frozen=True, slots=True)
class Pace:
    """What this model should reach here. `source`: where that is known from."""

    tokens_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Terms:
    policy: Policy = field(default_factory=Policy)
    hygiene: Hygiene = field(default_factory=Hygiene)
    strict: bool = False
    capability: str | None = None  # of the GPU: "8.7"
    l4t: str | None = None  # of a Jetson: "36.4.7"
    system_prompt: str = ""
    warmup_tokens: tuple[int, ...] = ()  # prompt lengths that are tried while idle
    pace: Pace | None = None
    preload: bool = True  # False: it sleeps until somebody asks
    ttl_s: float = 0.0  # idle seconds until it sleeps; 0 is never
    known: tuple[Degraded, ...] = ()  # differences that are there before the start
