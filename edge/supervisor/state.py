"""The whole lifecycle of one model's engine: `step(machine, event, now)` → the next machine and what to do. Pure.

One task owns a Machine (supervisor.py); everyone else posts events. ARCHITECTURE.md draws it; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from edge.status import Failure, State
from edge.supervisor.policy import Fault, Policy

LIVE = {State.STARTING, State.LOADING, State.WARMING, State.READY}
RISING = {State.STARTING, State.LOADING, State.WARMING}
ENDING = {State.DRAINING, State.STOPPING}
AT_REST = {State.STOPPED, State.FAILED, State.SLEEPING}


class Then(Enum):
    """What follows once the child is gone."""

    STOP = "stop"
    START = "start"  # asked for: at once
    RETRY = "retry"  # it hung: after the back-off


# --- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    now: bool = False  # no drain, SIGKILL


@dataclass(frozen=True, slots=True)
class Restart:
    pass


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
    """The engine runs, but without the GPU that the plan wants."""

    failure: Failure


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


Asked = Start | Stop | Restart
Seen = EngineLoading | EngineReady | Warmed | Exited | Hung | DeviceMissing | Refused | Drained | Tick
Event = Asked | Seen


# --- effects: what to do ---------------------------------------------------------------------------------------------


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


# --- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """`alive`: a child exists. `deadline`: monotonic seconds of BACKOFF, DRAINING and STOPPING."""

    rungs: int = 1
    state: State = State.STOPPED
    rung: int = 0
    plain: bool = False
    alive: bool = False
    then: Then = Then.STOP
    deadline: float | None = None
    ready_since: float | None = None
    crashes: int = 0
    kills: int = 0
    allocation_failures: int = 0
    device_misses: int = 0
    start_crash: str | None = None  # kind of the last crash while starting
    plain_tried: bool = False
    failure: Failure | None = None


Step = tuple[Machine, tuple[Effect, ...]]


def step(m: Machine, event: Event, now: float, policy: Policy) -> Step:
    """Unknown combinations change nothing: an event that comes late is no error."""
    match event:
        case Start() if m.state in AT_REST:
            return _afresh(m, now, policy)
        case Start() if m.state in ENDING and m.then is Then.STOP:
            return replace(m, then=Then.START), ()
        case Stop():
            return _stop(m, event, now, policy)
        case Restart():
            return _restart(m, now, policy)
        case EngineLoading() if m.state is State.STARTING:
            return replace(m, state=State.LOADING), ()
        case EngineReady() if m.state in {State.STARTING, State.LOADING}:
            return replace(m, state=State.WARMING), (WarmUp(),)
        case Warmed() if m.state is State.WARMING:
            return replace(m, state=State.READY, ready_since=now, failure=None, start_crash=None), ()
        case Exited():
            return _exited(m, event, now, policy)
        case Hung(failure) if m.state in LIVE:
            return _end(replace(m, failure=failure), Then.RETRY, now + policy.term_s, Terminate())
        case DeviceMissing(failure) if m.state in RISING:
            return _device_missing(replace(m, failure=failure), now, policy)
        case Refused(failure) if m.state in LIVE:
            return replace(m, state=State.FAILED, failure=failure, deadline=None), (Kill(),)
        case Drained() if m.state is State.DRAINING:
            return _end(m, m.then, now + policy.term_s, Terminate())
        case Tick() if m.deadline is not None and now >= m.deadline:
            return _due(m, now, policy)
    return m, ()


def _spawn(m: Machine) -> Step:
    fresh = replace(m, state=State.STARTING, alive=True, then=Then.STOP, deadline=None, ready_since=None)
    return fresh, (Spawn(fresh.rung, fresh.plain),)


def _afresh(m: Machine, now: float, policy: Policy) -> Step:
    """A start that somebody asked for forgets what went wrong before, but not a child that is still dying."""
    if m.alive:
        return _end(m, Then.START, now + policy.term_s, Kill())
    return _spawn(Machine(rungs=m.rungs, rung=m.rung, failure=m.failure))


def _end(m: Machine, then: Then, deadline: float, *effects: Effect) -> Step:
    return replace(m, state=State.STOPPING, then=then, deadline=deadline), effects


def _stop(m: Machine, event: Stop, now: float, policy: Policy) -> Step:
    if event.now and m.alive:
        return _end(m, Then.STOP, now + policy.term_s, Kill())
    if m.state in ENDING:
        return replace(m, then=Then.STOP), ()
    if m.state is State.READY:
        return replace(m, state=State.DRAINING, then=Then.STOP, deadline=now + policy.drain_s), ()
    if m.state in LIVE:
        return _end(m, Then.STOP, now + policy.term_s, Terminate())
    if m.state is State.BACKOFF:
        return replace(m, state=State.STOPPED, deadline=None), ()
    return m, ()  # at rest already; FAILED is only left by a start


def _restart(m: Machine, now: float, policy: Policy) -> Step:
    if m.state is State.READY:
        return replace(m, state=State.DRAINING, then=Then.START, deadline=now + policy.drain_s), ()
    if m.state in RISING:
        return _end(m, Then.START, now + policy.term_s, Terminate())
    if m.state in ENDING:
        return replace(m, then=Then.START), ()
    return _afresh(m, now, policy)


def _due(m: Machine, now: float, policy: Policy) -> Step:
    if m.state is State.BACKOFF:
        return _spawn(m)
    if m.state is State.DRAINING:
        return _end(m, m.then, now + policy.term_s, Terminate())
    if m.state is State.STOPPING:  # said until it is gone: a child in uninterruptible sleep takes its time
        return replace(m, deadline=now + policy.term_s), (Kill(),)
    return replace(m, deadline=None), ()


def _exited(m: Machine, event: Exited, now: float, policy: Policy) -> Step:
    gone = replace(m, alive=False, deadline=None, ready_since=None)
    if m.state in ENDING:
        if m.then is Then.STOP:
            return replace(gone, state=State.STOPPED), ()
        if m.then is Then.START:
            return _spawn(gone)
        return _pause(replace(gone, crashes=m.crashes + 1), now, policy.backoff(m.crashes + 1, event.luck))
    if m.state not in LIVE:
        return replace(m, alive=False), ()
    stable = m.ready_since is not None and now - m.ready_since >= policy.stable_s
    known = replace(gone, failure=event.failure, crashes=0 if stable else m.crashes)
    match event.fault:
        case Fault.PERMANENT:
            return replace(known, state=State.FAILED), ()
        case Fault.OOM | Fault.NVMAP:
            return _smaller(known, now, policy)
        case Fault.KILLED if m.state in RISING:
            if m.kills == 0:  # once more on the same rung before memory is suspected
                return _pause(replace(known, kills=1), now, policy.backoff(1, event.luck))
            return _smaller(known, now, policy)
        case Fault.DEVICE:
            return _without_device(known, now, policy)
    return _crashed(known, event, m.state in RISING, now, policy)


def _crashed(m: Machine, event: Exited, rising: bool, now: float, policy: Policy) -> Step:
    """The same crash twice while starting: one try with optional accelerations off; it stays so if that serves."""
    crashes = m.crashes + 1
    crashed = replace(m, crashes=crashes)
    if rising:
        again = m.start_crash == event.failure.kind and not m.plain_tried
        crashed = replace(crashed, plain=again, plain_tried=m.plain_tried or again, start_crash=event.failure.kind)
    return _pause(crashed, now, policy.backoff(crashes, event.luck))


def _pause(m: Machine, now: float, pause_s: float) -> Step:
    if pause_s <= 0:
        return _spawn(m)
    return replace(m, state=State.BACKOFF, deadline=now + pause_s), ()


def _smaller(m: Machine, now: float, policy: Policy) -> Step:
    """One rung down; on the last rung a few growing pauses (another process may let go), then FAILED."""
    if m.rung + 1 < m.rungs:
        return _spawn(replace(m, rung=m.rung + 1, kills=0))
    if m.allocation_failures < len(policy.allocation_pauses_s):
        pause_s = policy.allocation_pauses_s[m.allocation_failures]
        return _pause(replace(m, allocation_failures=m.allocation_failures + 1), now, pause_s)
    return replace(m, state=State.FAILED), ()


def _device_missing(m: Machine, now: float, policy: Policy) -> Step:
    ended, effects = _end(m, Then.RETRY, now + policy.term_s, Kill())
    return _count_device_miss(ended, policy, effects)


def _without_device(m: Machine, now: float, policy: Policy) -> Step:
    counted, _ = _count_device_miss(m, policy, ())
    if counted.state is State.FAILED:
        return counted, ()
    return _pause(counted, now, policy.backoff(counted.device_misses + 1, 0))


def _count_device_miss(m: Machine, policy: Policy, effects: tuple[Effect, ...]) -> Step:
    misses = m.device_misses + 1
    if misses <= policy.device_attempts:
        return replace(m, device_misses=misses), effects
    if policy.cpu_rung is None:
        return replace(m, state=State.FAILED, deadline=None), effects
    return replace(m, device_misses=misses, rung=policy.cpu_rung), effects
