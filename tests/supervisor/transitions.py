"""Find every transition of `step` by trying every event in every reachable machine."""

from __future__ import annotations

from msgspec.structs import replace

from edge.supervisor.events import (
    DeviceBack,
    DeviceMissing,
    Drained,
    EngineLoading,
    EngineReady,
    Event,
    Exited,
    FirstRequestDue,
    Hung,
    MemoryBack,
    Restart,
    Sleep,
    StartRefused,
    StartRequested,
    Stop,
    Tick,
    Warmed,
)
from edge.supervisor.policy import EngineFault, Policy
from edge.supervisor.state import ENDING, AfterExit, SupervisorState, step
from edge.supervisor.status import Failure

WHY = Failure("why", "", "")
EVENTS: tuple[Event, ...] = (
    StartRequested(),
    Stop(),
    Stop(now=True),
    Restart(),
    Sleep(),
    EngineLoading(),
    EngineReady(),
    FirstRequestDue(),
    Warmed(),
    *(Exited(fault, WHY) for fault in EngineFault),
    Hung(WHY),
    DeviceMissing(WHY),
    DeviceMissing(WHY, permanent=True),
    DeviceBack(),
    MemoryBack(),
    StartRefused(WHY),
    Drained(),
    Drained(saved=True),
    Tick(),
)
# Short series: what can follow what does not depend on how long they are.
POLICY = Policy(
    backoff_s=(0, 1), allocation_pauses_s=(5,), device_attempts=1, start_tries=2, stall_tries=2, start_limit=3
)
MOST = 1  # counters beyond this behave as at this

Transition = tuple[str, str, str]


def explore() -> set[Transition]:
    """Return (state, event, state) for every change of state."""
    found: set[Transition] = set()
    for policy in (POLICY, replace(POLICY, cpu_rung=2)):
        todo, seen = [SupervisorState(rungs=2)], set()
        while todo:
            machine = todo.pop()
            if machine in seen:
                continue
            seen.add(machine)
            for event in EVENTS:
                for after_s in (0.0, 1000.0):
                    after, _ = step(machine, event, after_s, policy)
                    if after.state is not machine.state:
                        found.add((machine.state.value, type(event).__name__, after.state.value))
                    if (known := _plain(after)) not in seen:
                        todo.append(known)
    return found


def _plain(machine: SupervisorState) -> SupervisorState:
    """Drop times and large counts: they do not change what can follow."""
    return replace(
        machine,
        deadline=None if machine.deadline is None else 500.0,
        ready_since=None if machine.ready_since is None else 0.0,
        crashes=min(machine.crashes, MOST),
        wedges=0,
        failure=None,
        then=machine.then if machine.state in ENDING else AfterExit.STOP,
        device_misses=min(machine.device_misses, MOST),
        same_failures=min(machine.same_failures, MOST),
        failed_starts=min(machine.failed_starts, 2),
        returns=0,
    )
