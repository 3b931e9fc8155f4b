"""The status of one model, as values that supervisor, gateway and CLI share."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

# In the order in which an engine passes them; a closed gate blocks all behind it.
GATES = ("driver", "context", "backend", "weights", "kv_cache", "warm")


class State(str, Enum):
    """The lifecycle of one model's engine. Only READY serves."""

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


class Gate(Struct, frozen=True):
    """One observed step of a start. `since_s`: monotonic; `took_s`: since the step before it, None where unknown."""

    ready: bool = False
    since_s: float | None = None
    took_s: float | None = None
    evidence: str | None = None
    blocked_by: str | None = None
    devices: dict[str, Gate] = field(default_factory=dict)


class Degraded(Struct, frozen=True):
    """A difference between the request and the running engine that does not stop it from serving."""

    subject: str
    wanted: str
    got: str
    because: str


class Failure(Struct, frozen=True):
    """Why an engine exited or could not start. `evidence` may hold log lines and paths and is never public."""

    kind: str
    evidence: str
    hint: str


class ModelStatus(Struct, frozen=True):
    """The status of one model at one instant. `progress`: the share of the weights that is read, 0…1."""

    id: str
    state: State
    rung: int = 0
    degraded: tuple[Degraded, ...] = ()
    gates: dict[str, Gate] = field(default_factory=dict)
    progress: float | None = None
    failure: Failure | None = None
    restarts: int = 0
    pid: int | None = None
