"""The whole lifecycle of one model's engine: `step(machine, event, now)` → the next machine and what to do. Pure.

One task owns a Machine (supervisor.py); everyone else posts events. ARCHITECTURE.md draws it; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from edge.status import Failure, State
from edge.supervisor.events import (
    DeviceBack,
    DeviceMissing,
    Drained,
    Effect,
    EngineLoading,
    EngineReady,
    Event,
    Exited,
    Hung,
    Kill,
    Refused,
    Restart,
    Sleep,
    Spawn,
    Start,
    Stop,
    Terminate,
    Tick,
    Warmed,
    WarmUp,
)
from edge.supervisor.policy import Fault, Policy

RISING = {State.STARTING, State.LOADING, State.WARMING}
LIVE = RISING | {State.READY}  # a child is there and shall stay
ENDING = {State.DRAINING, State.STOPPING}  # a child is there and shall go
AT_REST = {State.STOPPED, State.FAILED, State.SLEEPING}  # no child, nothing will happen by itself


class Then(Enum):
    """What follows once the child is gone."""

    STOP = "stop"
    SLEEP = "sleep"
    START = "start"  # asked for: at once
    HOME = "home"  # at once, on the rung that was planned
    RETRY = "retry"  # it hung: after the back-off
    NO_DEVICE = "no_device"  # it came up without the GPU: again, or as the profile says
    FAIL = "fail"


# A start that somebody asks for takes the place of these; the others start anyway.
_NO_START = {Then.STOP, Then.SLEEP, Then.FAIL}
_FAULTS = {Then.RETRY, Then.NO_DEVICE, Then.FAIL}


@dataclass(frozen=True, slots=True)
class Machine:
    """`alive`: a child exists. `home`: the planned rung. `deadline`: monotonic, of BACKOFF, DRAINING and STOPPING."""

    rungs: int = 1  # of the memory ladder; the CPU rung may lie above them
    home: int = 0
    state: State = State.STOPPED
    rung: int = 0
    plain: bool = False
    alive: bool = False
    then: Then = Then.STOP
    deadline: float | None = None
    ready_since: float | None = None
    crashes: int = 0
    kills: int = 0
    wedges: int = 0
    allocation_failures: int = 0
    device_misses: int = 0
    start_crash: str | None = None  # kind of the last crash while starting
    plain_tried: bool = False
    failure: Failure | None = None


def died(before: Machine, after: Machine) -> bool:
    """A child is gone that should have stayed: it crashed, or had to be ended."""
    faulty = before.state in LIVE or (before.state in ENDING and before.then in _FAULTS)
    return faulty and after.failure is not None and after.state in {State.STARTING, State.BACKOFF, State.FAILED}


Step = tuple[Machine, tuple[Effect, ...]]


def step(m: Machine, event: Event, now: float, policy: Policy) -> Step:
    """Unknown combinations change nothing: an event that comes late is no error."""
    match event:
        case Start() if m.state is State.SLEEPING:
            return _spawn(m)
        case Start() if m.state in AT_REST:
            return _afresh(m)
        case Start() if m.state in ENDING and m.then in _NO_START:
            return replace(m, then=Then.START), ()
        case Stop():
            return _stop(m, event, now, policy)
        case Restart():
            return _restart(m, now, policy)
        case Sleep() if m.state is State.READY:
            return _drain(m, Then.SLEEP, now, policy)
        case EngineLoading() if m.state is State.STARTING:
            return replace(m, state=State.LOADING), ()
        case EngineReady() if m.state in {State.STARTING, State.LOADING}:
            return replace(m, state=State.WARMING), (WarmUp(),)
        case Warmed() if m.state is State.WARMING:
            served = replace(m, failure=None, start_crash=None, plain_tried=False)
            return replace(served, state=State.READY, ready_since=now), ()
        case Exited():
            return _exited(m, event, now, policy)
        case Hung(failure) if m.state in LIVE:
            wedges = m.wedges + (m.state is State.READY)
            return _end(replace(m, failure=failure, wedges=wedges), Then.RETRY, now, policy, Terminate())
        case DeviceMissing(failure, permanent) if m.state in RISING:
            misses = policy.device_attempts if permanent else m.device_misses
            return _end(replace(m, failure=failure, device_misses=misses), Then.NO_DEVICE, now, policy, Kill())
        case DeviceBack() if m.state is State.READY and m.rung == policy.cpu_rung != m.home:
            return _drain(m, Then.HOME, now, policy)
        case Refused(failure) if m.state in LIVE:
            return _end(replace(m, failure=failure), Then.FAIL, now, policy, Kill())
        case Drained() if m.state is State.DRAINING:
            return _end(m, m.then, now, policy, Terminate())
        case Tick() if m.deadline is not None and now >= m.deadline:
            return _due(m, now, policy)
    return m, ()


# --- on the way up ---------------------------------------------------------------------------------------------------


def _spawn(m: Machine) -> Step:
    fresh = replace(m, state=State.STARTING, alive=True, then=Then.STOP, deadline=None, ready_since=None)
    return fresh, (Spawn(fresh.rung, fresh.plain),)


def _afresh(m: Machine) -> Step:
    """A start that somebody asked for forgets what went wrong before: memory may be free again, the cause mended."""
    return _spawn(Machine(rungs=m.rungs, home=m.home, rung=m.home, failure=m.failure))


def _pause(m: Machine, now: float, pause_s: float) -> Step:
    if pause_s <= 0:
        return _spawn(m)
    return replace(m, state=State.BACKOFF, deadline=now + pause_s), ()


# --- on the way down -------------------------------------------------------------------------------------------------


def _drain(m: Machine, then: Then, now: float, policy: Policy) -> Step:
    return replace(m, state=State.DRAINING, then=then, deadline=now + policy.drain_s), ()


def _end(m: Machine, then: Then, now: float, policy: Policy, *effects: Effect) -> Step:
    return replace(m, state=State.STOPPING, then=then, deadline=now + policy.term_s), effects


def _stop(m: Machine, event: Stop, now: float, policy: Policy) -> Step:
    if event.now and m.alive:
        return _end(m, Then.STOP, now, policy, Kill())
    if m.state in ENDING:
        return replace(m, then=Then.STOP), ()
    if m.state is State.READY:
        return _drain(m, Then.STOP, now, policy)
    if m.state in RISING:
        return _end(m, Then.STOP, now, policy, Terminate())
    if m.state in {State.BACKOFF, State.SLEEPING}:
        return replace(m, state=State.STOPPED, deadline=None), ()
    return m, ()  # stopped already; FAILED is only left by a start


def _restart(m: Machine, now: float, policy: Policy) -> Step:
    if m.state is State.READY:
        return _drain(m, Then.HOME, now, policy)
    if m.state in RISING:
        return _end(m, Then.HOME, now, policy, Terminate())
    if m.state in ENDING:
        return replace(m, then=Then.HOME), ()
    return _afresh(m)


def _due(m: Machine, now: float, policy: Policy) -> Step:
    if m.state is State.BACKOFF:
        return _spawn(m)
    if m.state is State.DRAINING:
        return _end(m, m.then, now, policy, Terminate())
    # STOPPING. Said until it is gone: a child in uninterruptible sleep takes its time.
    return replace(m, deadline=now + policy.term_s), (Kill(),)


# --- the child is gone -----------------------------------------------------------------------------------------------


def _exited(m: Machine, event: Exited, now: float, policy: Policy) -> Step:
    if m.state not in LIVE | ENDING:
        return m, ()
    stable = m.ready_since is not None and now - m.ready_since >= policy.stable_s
    gone = replace(_forgiven(m) if stable else m, alive=False, deadline=None, ready_since=None)
    if m.state in ENDING:
        return _ended(gone, m, event, now, policy)
    return _died(replace(gone, failure=event.failure), m, event, now, policy)


def _forgiven(m: Machine) -> Machine:
    """It served for long enough: what comes now is no part of an earlier series."""
    return replace(m, crashes=0, kills=0, allocation_failures=0, device_misses=0)


def _ended(gone: Machine, m: Machine, event: Exited, now: float, policy: Policy) -> Step:
    match m.then:
        case Then.STOP:
            return replace(gone, state=State.STOPPED), ()
        case Then.SLEEP:
            return replace(gone, state=State.SLEEPING), ()
        case Then.FAIL:
            return replace(gone, state=State.FAILED), ()
        case Then.START:
            return _spawn(gone)
        case Then.HOME:
            return _afresh(gone)
        case Then.NO_DEVICE:
            return _without_device(gone, now, policy)
    # It hung. What its log or the kernel says of a cause counts more than that.
    if event.fault in {Fault.PERMANENT, Fault.OOM, Fault.NVMAP, Fault.DEVICE}:
        return _died(replace(gone, failure=event.failure), m, event, now, policy)
    hung = Exited(Fault.CRASH, m.failure or event.failure, event.luck)
    return _crashed(gone, hung, m.ready_since is None, now, policy)


def _died(gone: Machine, m: Machine, event: Exited, now: float, policy: Policy) -> Step:
    """`m` is the machine before, `gone` the one without its child."""
    rising = m.ready_since is None
    match event.fault:
        case Fault.PERMANENT:
            return replace(gone, state=State.FAILED), ()
        case Fault.OOM | Fault.NVMAP:
            return _smaller(gone, now, policy)
        case Fault.KILLED if rising and m.kills == 0:  # once more on the same rung before memory is suspected
            return _pause(replace(gone, kills=1), now, policy.backoff(1, event.luck))
        case Fault.KILLED if rising:
            return _smaller(gone, now, policy)
        case Fault.DEVICE:
            return _without_device(gone, now, policy)
    return _crashed(gone, event, rising, now, policy)


def _crashed(m: Machine, event: Exited, rising: bool, now: float, policy: Policy) -> Step:
    """The same crash twice while starting: one try with optional accelerations off; it stays so if that serves."""
    crashes = m.crashes + 1
    crashed = replace(m, crashes=crashes)
    if rising:
        again = m.start_crash == event.failure.kind and not m.plain_tried
        plain = again or (m.plain and not m.plain_tried)  # it has served so before
        crashed = replace(crashed, plain=plain, plain_tried=m.plain_tried or again, start_crash=event.failure.kind)
    return _pause(crashed, now, policy.backoff(crashes, event.luck))


def _smaller(m: Machine, now: float, policy: Policy) -> Step:
    """One rung down; on the last rung a few growing pauses (another process may let go), then FAILED."""
    if m.rung + 1 < m.rungs:
        return _spawn(replace(m, rung=m.rung + 1, kills=0))
    if m.allocation_failures < len(policy.allocation_pauses_s):
        pause_s = policy.allocation_pauses_s[m.allocation_failures]
        return _pause(replace(m, allocation_failures=m.allocation_failures + 1), now, pause_s)
    return replace(m, state=State.FAILED), ()


def _without_device(m: Machine, now: float, policy: Policy) -> Step:
    """A driver may be late: a few tries, then FAILED or the CPU, as the profile says."""
    misses = m.device_misses + 1
    counted = replace(m, device_misses=misses)
    if misses <= policy.device_attempts:
        return _pause(counted, now, policy.backoff(misses + 1, 0))
    if policy.cpu_rung is None or m.rung == policy.cpu_rung:
        return replace(counted, state=State.FAILED), ()
    return _spawn(replace(counted, rung=policy.cpu_rung))
