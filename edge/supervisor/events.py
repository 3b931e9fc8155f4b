"""Events of one model's engine and the effects that answer them. Values only; state.py connects them."""

from __future__ import annotations

from dataclasses import dataclass

from edge.status import Failure
from edge.supervisor.policy import Fault

# --- requested -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start from rest at once; while a child ends, after it has gone."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Drain, then end the child."""

    now: bool = False  # no drain, SIGKILL


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again on the planned rung, with all counters of failures reset."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """End the idle child and give its memory back until the next request."""


# --- observed---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineLoading:
    """The engine runs and reads the model."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine reports ready."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """A completion came back."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The child is reaped, or could not be spawned. `jitter`: a random number 0…1 that spreads the pause."""

    fault: Fault
    failure: Failure
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Hung:
    """Nothing moves: a stalled load, or a request that an engine does not answer."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class DeviceMissing:
    """The engine runs without the GPU that the plan needs. `permanent`: another start would see the same."""

    failure: Failure
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class DeviceBack:
    """The GPU that was missing answers again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine differs from its plan, and `strict` forbids to serve it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Drained:
    """The last open request ended."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: check the deadline."""


Command = Start | Stop | Restart | Sleep
Observation = (
    EngineLoading | EngineReady | Warmed | Exited | Hung | DeviceMissing | DeviceBack | Refused | Drained | Tick
)
Event = Command | Observation


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    """Spawn a child. `safe_mode`: with optional accelerations off."""

    rung: int
    safe_mode: bool = False


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Send the first completion."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL."""


Effect = Spawn | WarmUp | Terminate | Kill
