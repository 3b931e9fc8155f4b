"""The lifecycle of one model's engine as a pure function: machine and event to the next machine and its effects.

One task owns a SupervisorState (supervisor.py); everything else posts events. ARCHITECTURE.md draws it, and a test
compares the two.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from edge.supervisor.events import (
    DeviceBack,
    DeviceMissing,
    Drained,
    Effect,
    EngineLoading,
    EngineReady,
    Event,
    Exited,
    FirstRequestDue,
    Hung,
    Kill,
    MemoryBack,
    Restart,
    Sleep,
    Spawn,
    StartRefused,
    StartRequested,
    Stop,
    Terminate,
    Tick,
    Warmed,
    WarmUp,
)
from edge.supervisor.policy import EngineFault, Policy
from edge.supervisor.status import Failure, State

STARTING_STATES = {State.STARTING, State.LOADING, State.WARMING}
LIVE = STARTING_STATES | {State.READY}  # a child exists and is to stay
ENDING = {State.DRAINING, State.STOPPING}  # a child exists and is to go
AT_REST = {State.STOPPED, State.FAILED, State.SLEEPING}  # no child, and no deadline


class AfterExit(Enum):
    """The next step once the child is gone."""

    STOP = "stop"
    SLEEP = "sleep"
    START = "start"  # requested: at once
    HOME = "home"  # at once, on the planned rung
    RETRY = "retry"  # it hung: after the back-off
    NO_DEVICE = "no_device"  # it ran without the GPU: retry, then FAILED or the CPU as the profile says
    FAIL = "fail"


# A requested start replaces these; the others start anyway.
_NO_START = {AfterExit.STOP, AfterExit.SLEEP, AfterExit.FAIL}
_FAULTS = {AfterExit.RETRY, AfterExit.NO_DEVICE, AfterExit.FAIL}


KILLED = "killed"  # failure kind of a SIGKILL whose sender is unknown


class Applied(NamedTuple):
    """A remedy in force, and the kind of the failure that led to it."""

    id: str
    kind: str


class SupervisorState(Struct, frozen=True):
    """The state of one supervisor.

    `home`: the planned rung. `alive`: a child exists. `deadline`: monotonic, of BACKOFF, DRAINING and STOPPING.
    `kept`: remedies of the last start that served; `trial`: those that the present start adds; `tried`: ids that did
    not help since, and ALL once all of them together did not. `rung_lost`: by a request's memory or by kills without
    evidence, so that the planned rung is tried again after a time. `admits`: WARMING, and requests are let in.
    `admitted`: requests were let into this child, so that one of them may have ended it.
    """

    rungs: int = 1  # of the memory ladder; the CPU rung may lie above them
    home: int = 0
    state: State = State.STOPPED
    rung: int = 0
    kept: tuple[Applied, ...] = ()
    trial: tuple[Applied, ...] = ()
    tried: tuple[str, ...] = ()
    alive: bool = False
    then: AfterExit = AfterExit.STOP
    deadline: float | None = None
    ready_since: float | None = None
    crashes: int = 0
    kills: int = 0
    wedges: int = 0
    allocation_failures: int = 0
    device_misses: int = 0
    start_crash: str | None = None  # kind of the last crash while starting
    same_failures: int = 0  # starts in a row that failed as start_crash, with no remedy left
    failed_starts: int = 0  # starts in a row that failed by a crash, a hang or a kill
    rung_lost: bool = False
    returns: int = 0  # to the planned rung after a lost one
    short_of_memory: bool = False  # FAILED for want of memory
    admits: bool = False
    admitted: bool = False
    failure: Failure | None = None

    @property
    def suspected(self) -> bool:
        """Whether a smaller rung or a remedy is in force without evidence that every start needs it."""
        return self.rung_lost or any(remedy.kind == KILLED for remedy in self.kept)

    @property
    def serves(self) -> bool:
        """Whether requests may be in the engine, so that its end waits for them."""
        return self.state is State.READY or self.admits

    @property
    def unharmed(self) -> bool:
        """Whether no start of this series failed: a death in the first request is then worth a start without it."""
        return not (self.crashes or self.kills or self.allocation_failures or self.device_misses or self.failed_starts)

    @property
    def remedies(self) -> tuple[Applied, ...]:
        return (*self.kept, *self.trial)


def died(before: SupervisorState, after: SupervisorState) -> bool:
    """Return whether a child is gone that was to stay: it crashed, or had to be ended."""
    faulty = before.state in LIVE or (before.state in ENDING and before.then in _FAULTS)
    return faulty and after.failure is not None and after.state in {State.STARTING, State.BACKOFF, State.FAILED}


Step = tuple[SupervisorState, tuple[Effect, ...]]


def step(m: SupervisorState, event: Event, now: float, policy: Policy) -> Step:
    """Return the next machine and its effects. Late events, which no state expects, change nothing."""
    match event:
        case StartRequested() if m.state is State.SLEEPING:
            return _spawn(m)
        case StartRequested() if m.state in AT_REST:
            return _afresh(m, m.kept if m.state is State.STOPPED else ())
        case StartRequested() if m.state in ENDING and m.then in _NO_START:
            return replace(m, then=AfterExit.START), ()
        case Stop():
            return _stop(m, event, now, policy)
        case Restart():
            return _restart(m, now, policy)
        case Sleep():
            return _sleep(m, now, policy)
        case EngineLoading() if m.state is State.STARTING:
            return replace(m, state=State.LOADING), ()
        case EngineReady() if m.state in {State.STARTING, State.LOADING}:
            return replace(m, state=State.WARMING), (WarmUp(),)
        case FirstRequestDue() if m.state is State.WARMING and m.unharmed:
            return replace(m, admits=True, admitted=True), ()
        case Warmed() if m.state is State.WARMING:
            served = replace(m, failure=None, kept=m.remedies, trial=(), tried=(), admits=False)
            served = replace(served, admitted=True, start_crash=None, same_failures=0, failed_starts=0)
            return replace(served, state=State.READY, ready_since=now), ()
        case Exited():
            return _exited(m, event, now, policy)
        case Hung(failure) if m.state in LIVE:
            wedges = m.wedges + (m.state is State.READY)
            return _end(replace(m, failure=failure, wedges=wedges), AfterExit.RETRY, now, policy, Terminate())
        case DeviceMissing(failure, permanent) if m.state in STARTING_STATES:
            misses = policy.device_attempts if permanent else m.device_misses
            return _end(replace(m, failure=failure, device_misses=misses), AfterExit.NO_DEVICE, now, policy, Kill())
        case DeviceBack() if m.state is State.READY and m.rung == policy.cpu_rung != m.home:
            return _drain(m, AfterExit.HOME, now, policy)
        case MemoryBack() if m.state is State.FAILED and m.short_of_memory:
            return _afresh(m)
        case MemoryBack() if m.state is State.READY and m.suspected and m.ready_since is not None:
            # Each return that did not last doubles the time before the next.
            due = now - m.ready_since >= policy.rung_back_s * 2**m.returns
            return _drain(replace(m, returns=m.returns + 1), AfterExit.HOME, now, policy) if due else (m, ())
        case StartRefused(failure) if m.state in LIVE:
            return _end(replace(m, failure=failure), AfterExit.FAIL, now, policy, Kill())
        case Drained(saved) if m.state is State.DRAINING:
            # Another model waits for this memory, and SIGTERM waits for the batch that is computed: seconds on a CPU.
            return _end(m, m.then, now, policy, Kill() if saved and m.then is AfterExit.SLEEP else Terminate())
        case Tick() if m.deadline is not None and now >= m.deadline:
            return _due(m, now, policy)
    return m, ()


# --- starting -------------------------------------------------------------------------------------------------------


def _spawn(m: SupervisorState) -> Step:
    fresh = replace(m, state=State.STARTING, alive=True, then=AfterExit.STOP, deadline=None, ready_since=None)
    fresh = replace(fresh, admitted=False)
    return fresh, (Spawn(fresh.rung, tuple(remedy.id for remedy in fresh.remedies)),)


def _afresh(m: SupervisorState, kept: tuple[Applied, ...] = ()) -> Step:
    """Spawn with all counters reset: at a requested start memory may be free again, or the cause repaired."""
    fresh = SupervisorState(rungs=m.rungs, home=m.home, rung=m.home, kept=kept)
    return _spawn(replace(fresh, failure=m.failure, returns=m.returns))


def _pause(m: SupervisorState, now: float, pause_s: float) -> Step:
    if pause_s <= 0:
        return _spawn(m)
    return replace(m, state=State.BACKOFF, deadline=now + pause_s), ()


# --- ending ---------------------------------------------------------------------------------------------------------


def _drain(m: SupervisorState, then: AfterExit, now: float, policy: Policy) -> Step:
    return replace(m, state=State.DRAINING, then=then, deadline=now + policy.drain_s, admits=False), ()


def _end(m: SupervisorState, then: AfterExit, now: float, policy: Policy, *effects: Effect) -> Step:
    return replace(m, state=State.STOPPING, then=then, deadline=now + policy.term_s, admits=False), effects


def _stop(m: SupervisorState, event: Stop, now: float, policy: Policy) -> Step:
    if event.now and m.alive:
        return _end(m, AfterExit.STOP, now, policy, Kill())
    if m.state in ENDING:
        return replace(m, then=AfterExit.STOP), ()
    if m.serves:
        return _drain(m, AfterExit.STOP, now, policy)
    if m.state in STARTING_STATES:
        return _end(m, AfterExit.STOP, now, policy, Terminate())
    if m.state in {State.BACKOFF, State.SLEEPING}:
        return replace(m, state=State.STOPPED, deadline=None), ()
    return m, ()  # stopped already; FAILED is only left by a start


def _sleep(m: SupervisorState, now: float, policy: Policy) -> Step:
    if m.serves:
        return _drain(m, AfterExit.SLEEP, now, policy)
    if m.state in STARTING_STATES:  # an engine that never becomes ready can be put to sleep, too
        return _end(m, AfterExit.SLEEP, now, policy, Terminate())
    if m.state in ENDING and m.then in {AfterExit.START, AfterExit.HOME}:
        return replace(m, then=AfterExit.SLEEP), ()
    if m.state in {State.BACKOFF, State.STOPPED}:
        return replace(m, state=State.SLEEPING, deadline=None), ()
    return m, ()


def _restart(m: SupervisorState, now: float, policy: Policy) -> Step:
    if m.serves:
        return _drain(m, AfterExit.HOME, now, policy)
    if m.state in STARTING_STATES:
        return _end(m, AfterExit.HOME, now, policy, Terminate())
    if m.state in ENDING:
        return replace(m, then=AfterExit.HOME), ()
    return _afresh(m)


def _due(m: SupervisorState, now: float, policy: Policy) -> Step:
    if m.state is State.BACKOFF:
        return _spawn(m)
    if m.state is State.DRAINING:
        return _end(m, m.then, now, policy, Terminate())
    # STOPPING. Repeated until it is gone: a process in uninterruptible sleep takes no signal before it wakes.
    return replace(m, deadline=now + policy.term_s), (Kill(),)


# --- the child is gone -----------------------------------------------------------------------------------------------


def _exited(m: SupervisorState, event: Exited, now: float, policy: Policy) -> Step:
    if m.state not in LIVE | ENDING:
        return m, ()
    stable = m.ready_since is not None and now - m.ready_since >= policy.stable_s
    gone = replace(_forgiven(m) if stable else m, alive=False, deadline=None, ready_since=None, admits=False)
    if m.state in ENDING:
        return _ended(gone, m, event, now, policy)
    return _died(replace(gone, failure=event.failure), m, event, now, policy)


def _forgiven(m: SupervisorState) -> SupervisorState:
    """Reset the counters of a child that was READY for `stable_s`: a later failure starts a new series."""
    fresh = replace(m, crashes=0, kills=0, allocation_failures=0, device_misses=0)
    if not m.suspected:
        return fresh
    kept = tuple(remedy for remedy in m.kept if remedy.kind != KILLED)
    return replace(fresh, rung=m.home if m.rung_lost else m.rung, rung_lost=False, kept=kept)


def _ended(gone: SupervisorState, m: SupervisorState, event: Exited, now: float, policy: Policy) -> Step:
    match m.then:
        case AfterExit.STOP:
            return replace(gone, state=State.STOPPED), ()
        case AfterExit.SLEEP:
            return replace(gone, state=State.SLEEPING), ()
        case AfterExit.FAIL:
            return replace(gone, state=State.FAILED), ()
        case AfterExit.START:
            return _spawn(gone)
        case AfterExit.HOME:
            return _afresh(gone)
        case AfterExit.NO_DEVICE:
            return _without_device(gone, now, policy)
    # It hung. A cause in its log or from the kernel is more precise than the hang.
    if event.fault in {EngineFault.PERMANENT, EngineFault.OOM, EngineFault.NVMAP, EngineFault.DEVICE}:
        return _died(replace(gone, failure=event.failure), m, event, now, policy)
    hung = replace(event, fault=EngineFault.CRASH, failure=m.failure or event.failure)
    tries = policy.stall_tries if m.ready_since is None else policy.start_tries
    return _crashed(gone, hung, m.ready_since is None, now, policy, tries)


def _died(gone: SupervisorState, m: SupervisorState, event: Exited, now: float, policy: Policy) -> Step:
    """Act on an unrequested exit. `m` is the machine before it, `gone` the one without the child."""
    starting = m.ready_since is None and not m.admits  # a client's request may be the cause: the next start shows it
    match event.fault:
        case EngineFault.PERMANENT:
            return _cured(gone, event) or (replace(gone, state=State.FAILED), ())
        case EngineFault.OOM | EngineFault.NVMAP:
            return _smaller(replace(gone, rung_lost=gone.rung_lost or not starting), event, now, policy)
        case EngineFault.KILLED if starting and m.kills == 0:  # one retry before memory is suspected
            return _pause(replace(gone, kills=1), now, policy.backoff(1, event.jitter))
        case EngineFault.KILLED if starting:
            return _cured(gone, event) or _smaller(replace(gone, rung_lost=True), event, now, policy)
        case EngineFault.DEVICE:
            return _without_device(gone, now, policy)
    return _crashed(gone, event, starting, now, policy, policy.start_tries)


def _crashed(m: SupervisorState, event: Exited, starting: bool, now: float, policy: Policy, tries: int) -> Step:
    """Pause before the next start; a start that fails the same way again tries the remedies, then ends in FAILED.

    The first failure may be an accident: only an equal second one, or a third of any kind, costs a remedy. `tries`:
    equal failures with no remedy left.
    """
    crashes = m.crashes + 1
    crashed = replace(m, crashes=crashes)
    pause_s = policy.backoff(crashes, event.jitter)
    if not starting:
        return _pause(crashed, now, pause_s)
    same = m.start_crash == event.failure.kind
    crashed = replace(crashed, start_crash=event.failure.kind, failed_starts=m.failed_starts + 1)
    if same or crashed.failed_starts >= 3:
        cured = _next_remedy(crashed, event)
        if cured is not None:
            return _pause(cured, now, pause_s)
    crashed = replace(crashed, trial=(), same_failures=m.same_failures + 1 if same else 1)
    if crashed.same_failures >= tries or crashed.failed_starts >= policy.start_limit:
        return replace(crashed, state=State.FAILED), ()
    return _pause(crashed, now, pause_s)


ALL = "all"


def _next_remedy(m: SupervisorState, event: Exited) -> SupervisorState | None:
    """Return the machine with the next remedy under trial: each alone, then all together; None when none is left."""
    kind = event.failure.kind
    left = [id for id in event.remedies if id not in m.tried and id not in {remedy.id for remedy in m.remedies}]
    if left:
        return replace(m, trial=(Applied(left[0], kind),), tried=(*m.tried, left[0]))
    if len(m.tried) > 1 and ALL not in m.tried:
        return replace(m, trial=tuple(Applied(id, kind) for id in m.tried), tried=(*m.tried, ALL))
    return None


def _cured(m: SupervisorState, event: Exited) -> Step | None:
    """Spawn at once with the next remedy; None when none is left."""
    cured = _next_remedy(m, event)
    return None if cured is None else _spawn(cured)


def _smaller(m: SupervisorState, event: Exited, now: float, policy: Policy) -> Step:
    """Take the next smaller rung; on the last one try the remedies, then pause a few times, then FAILED."""
    if m.rung + 1 < m.rungs:
        return _spawn(replace(m, rung=m.rung + 1, kills=0, trial=()))
    if (cured := _cured(m, event)) is not None:
        return cured
    m = replace(m, trial=())
    if m.allocation_failures < len(policy.allocation_pauses_s):
        pause_s = policy.allocation_pauses_s[m.allocation_failures]
        return _pause(replace(m, allocation_failures=m.allocation_failures + 1), now, pause_s)
    return replace(m, state=State.FAILED, short_of_memory=True), ()


def _without_device(m: SupervisorState, now: float, policy: Policy) -> Step:
    """Retry a few times, since a driver may be late at boot; then FAILED or the CPU, as the profile says."""
    misses = m.device_misses + 1
    counted = replace(m, device_misses=misses)
    if misses <= policy.device_attempts:
        return _pause(counted, now, policy.backoff(misses + 1, 0))
    if policy.cpu_rung is None or m.rung == policy.cpu_rung:
        return replace(counted, state=State.FAILED), ()
    return _spawn(replace(counted, rung=policy.cpu_rung))
