"""Events of one model's engine and the effects that answer them. Values only; state.py connects them."""

from __future__ import annotations

from msgspec import Struct

from edge.supervisor.policy import EngineFault
from edge.supervisor.status import Failure

# --- requested -------------------------------------------------------------------------------------------------------


class StartRequested(Struct, frozen=True):
    """Start from rest at once; while a child ends, after it has gone."""


class Stop(Struct, frozen=True):
    """Drain, then end the child."""

    now: bool = False  # no drain, SIGKILL


class Restart(Struct, frozen=True):
    """Start again on the planned rung, with all counters of failures reset."""


class Sleep(Struct, frozen=True):
    """End the child after its open requests, or while it starts; the next request starts one again."""


# --- observed---------------------------------------------------------------------------------------------------------


class EngineLoading(Struct, frozen=True):
    """The engine runs and reads the model."""


class EngineReady(Struct, frozen=True):
    """The engine reports ready."""


class FirstRequestDue(Struct, frozen=True):
    """Requests wait while the engine has yet to complete its first: one of them may be that first."""


class Warmed(Struct, frozen=True):
    """A completion came back."""


class Exited(Struct, frozen=True):
    """The child is reaped, or could not be spawned. `jitter`: a random number 0…1 that spreads the pause.

    `remedies`: ids of the changes that may cure the failure, in the order to try them.
    """

    fault: EngineFault
    failure: Failure
    jitter: float = 0.0
    remedies: tuple[str, ...] = ()


class Hung(Struct, frozen=True):
    """Nothing moves: a stalled load, or a request that an engine does not answer."""

    failure: Failure


class DeviceMissing(Struct, frozen=True):
    """The engine runs without the GPU that the plan needs. `permanent`: another start would see the same."""

    failure: Failure
    permanent: bool = False


class DeviceBack(Struct, frozen=True):
    """The GPU that was missing answers again."""


class MemoryBack(Struct, frozen=True):
    """Memory was freed, or the child has served long enough on a smaller rung: a larger one may be tried."""


class StartRefused(Struct, frozen=True):
    """The engine runs and differs from its plan, and `strict` forbids to serve it."""

    failure: Failure


class Drained(Struct, frozen=True):
    """The last open request ended. `saved`: the process has nothing left to write, so it may be killed at once."""

    saved: bool = False


class Tick(Struct, frozen=True):
    """Time passed: check the deadline."""


Event = (
    StartRequested
    | Stop
    | Restart
    | Sleep
    | EngineLoading
    | EngineReady
    | FirstRequestDue
    | Warmed
    | Exited
    | Hung
    | DeviceMissing
    | DeviceBack
    | MemoryBack
    | StartRefused
    | Drained
    | Tick
)


# --- effects ---------------------------------------------------------------------------------------------------------


class Spawn(Struct, frozen=True):
    """Spawn a child. `remedies`: ids of changes to the rung's plan."""

    rung: int
    remedies: tuple[str, ...] = ()


class WarmUp(Struct, frozen=True):
    """Send the first completion."""


class Terminate(Struct, frozen=True):
    """Send SIGTERM."""


class Kill(Struct, frozen=True):
    """Send SIGKILL."""


Effect = Spawn | WarmUp | Terminate | Kill
