"""Options that hold for every child of one model. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.status import Degraded
from edge.supervisor.hygiene import Hygiene
from edge.supervisor.policy import Policy


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """The speed that a model should reach on this board. `source` names where the number comes from."""

    tokens_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of one supervisor, from the configuration, the profile and the board."""

    policy: Policy = field(default_factory=Policy)
    hygiene: Hygiene = field(default_factory=Hygiene)
    strict: bool = False  # refuse to serve with any Degraded
    capability: str | None = None  # of the GPU: "8.7"
    l4t: str | None = None  # release of a Jetson's system: "36.4.7"
    system_prompt: str = ""
    warmup_tokens: tuple[int, ...] = ()  # prompt lengths of the idle warm-up
    expected_speed: ExpectedSpeed | None = None
    preload: bool = True  # False: sleep until the first request
    ttl_s: float = 0.0  # idle seconds until it sleeps; 0 is never
    known: tuple[Degraded, ...] = ()  # differences from the request that are known before the start
