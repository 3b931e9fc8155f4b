"""What can happen to one model's engine, and what can be done about it. Values only; state.py ties them together."""

from __future__ import annotations

from dataclasses import dataclass

from edge.status import Failure
from edge.supervisor.policy import Fault

# --- asked for -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """From rest: at once. While a child ends: when it has gone."""


@dataclass(frozen=True, slots=True)
class Stop:
    now: bool = False  # no drain, SIGKILL


@dataclass(frozen=True, slots=True)
class Restart:
    """On the planned rung, with everything that went wrong before forgotten."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Idle for long enough: give the memory back until somebody asks."""


# --- seen ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineLoading:
    """The engine came up and reads the model."""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine calls itself ready."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """A real completion came back."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The child is gone and reaped (or could not be spawned at all). `luck` 0…1 spreads the pause."""

    fault: Fault
    failure: Failure
    luck: float = 0.0


@dataclass(frozen=True, slots=True)
class Hung:
    """Nothing moves: a stalled load, or a request that waits on a wedged engine."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class DeviceMissing:
    """The engine runs, but without the GPU that the plan wants. `permanent`: another try would see the same."""

    failure: Failure
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class DeviceBack:
    """The GPU that was missing answers again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """What came up is not what was planned, and `strict` forbids to serve it."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Drained:
    """No request is open any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are looked at."""


Asked = Start | Stop | Restart | Sleep
Seen = EngineLoading | EngineReady | Warmed | Exited | Hung | DeviceMissing | DeviceBack | Refused | Drained | Tick
Event = Asked | Seen


# --- to be done ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawn:
    rung: int
    plain: bool = False  # optional accelerations off


@dataclass(frozen=True, slots=True)
class WarmUp:
    pass


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL."""


Effect = Spawn | WarmUp | Terminate | Kill
