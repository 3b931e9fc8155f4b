"""What the supervisor knows about one model, as values that the gateway, the CLI and the tests share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

GATES = ("driver", "context", "backend", "weights", "kv_cache", "warm")


class State(str, Enum):
    """Lifecycle of one model's engine. Only READY serves."""

    STOPPED = "STOPPED"
    STARTING = "STARTING"
    LOADING = "LOADING"
    WARMING = "WARMING"
    READY = "READY"
    SLEEPING = "SLEEPING"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Gate:
    """One observed step of a start. `since_s`: monotonic clock; `took_s`: from when nothing blocked it."""

    ready: bool = False
    since_s: float | None = None
    took_s: float | None = None
    evidence: str | None = None
    blocked_by: str | None = None
    devices: dict[str, Gate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Degraded:
    """A difference between plan and fact that still serves."""

    subject: str
    wanted: str
    got: str
    because: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine died or could not start. `evidence` may hold log lines and paths: never public."""

    kind: str
    evidence: str
    hint: str


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model at one instant."""

    id: str
    state: State
    rung: int = 0
    degraded: tuple[Degraded, ...] = ()
    gates: dict[str, Gate] = field(default_factory=dict)
    progress: float | None = None  # 0…1 of the weights
    failure: Failure | None = None
    restarts: int = 0
    pid: int | None = None
