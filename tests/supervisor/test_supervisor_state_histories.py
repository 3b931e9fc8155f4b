"""Named event histories of the machine. Each row: what happens, the state after it, what is done about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
from edge.supervisor.state import Machine, step

POLICY = Policy(jitter=0)  # backoff 0 1 2 4 …, stable 60, drain 30, term 10, allocation pauses 5 15 45
WITH_CPU = replace(POLICY, cpu_rung=3)


def exited(fault: Fault = Fault.CRASH, kind: str = "exited") -> Exited:
    return Exited(fault, Failure(kind, "evidence", "hint"))


START, STOP, STOP_NOW, RESTART, SLEEP = Start(), Stop(), Stop(now=True), Restart(), Sleep()
LOADING, READY, WARM, DRAINED, TICK, BACK = EngineLoading(), EngineReady(), Warmed(), Drained(), Tick(), DeviceBack()
CRASH, ABORT = exited(), exited(kind="signal_abrt")
PERMANENT, OOM, NVMAP = exited(Fault.PERMANENT, "bad_flag"), exited(Fault.OOM, "oom"), exited(Fault.NVMAP, "nvmap")
KILLED, GPU_GONE = exited(Fault.KILLED, "killed"), exited(Fault.DEVICE, "no_gpu")
HUNG = Hung(Failure("wedged", "", ""))
NO_GPU = DeviceMissing(Failure("no_gpu", "", ""))
OLD_DRIVER = DeviceMissing(Failure("driver_too_old", "", ""), permanent=True)
REFUSED = Refused(Failure("degraded", "", ""))

Row = tuple[Event | float, str] | tuple[Event | float, str, str]

UP: tuple[Row, ...] = (
    (START, "STARTING", "spawn 0"),
    (LOADING, "LOADING"),
    (READY, "WARMING", "warm"),
    (WARM, "READY"),
)
AGAIN: tuple[Row, ...] = ((READY, "WARMING", "warm"), (WARM, "READY"))


def on_last_rung(state: State = State.STOPPED) -> Machine:
    return Machine(rungs=3, home=2, rung=2, state=state)


# A number is time that passes, in seconds, followed by a tick.
HISTORIES: dict[str, tuple[Row, ...]] = {
    "a clean start": UP,
    "an engine that says nothing until it is ready": (
        (START, "STARTING", "spawn 0"),
        (READY, "WARMING", "warm"),
        (WARM, "READY"),
    ),
    "an engine that says loading over and over": (*UP[:2], (LOADING, "LOADING"), (LOADING, "LOADING"), *UP[2:]),
    "ready is said twice": (*UP[:3], (READY, "WARMING"), (WARM, "READY"), (READY, "READY"), (WARM, "READY")),
    "a second start changes nothing": (*UP, (START, "READY")),
    "a start while it starts changes nothing": (UP[0], (START, "STARTING"), *UP[1:]),
    "stop waits for open requests": (
        *UP,
        (STOP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "stop does not wait for ever": (
        *UP,
        (STOP, "DRAINING"),
        (29.0, "DRAINING"),
        (1.0, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "a child that ignores SIGTERM is killed (FC-37)": (
        *UP,
        (STOP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (9.0, "STOPPING"),
        (1.0, "STOPPING", "kill"),
        (KILLED, "STOPPED"),
    ),
    "a child in uninterruptible sleep is killed again and again": (
        *UP[:2],
        (STOP, "STOPPING", "term"),
        (10.0, "STOPPING", "kill"),
        (10.0, "STOPPING", "kill"),
        (10.0, "STOPPING", "kill"),
        (KILLED, "STOPPED"),
    ),
    "stop while it loads needs no drain; 143 is normal": (
        *UP[:2],
        (STOP, "STOPPING", "term"),
        (exited(kind="signal_term"), "STOPPED"),
    ),
    "stop now kills": (*UP, (STOP_NOW, "STOPPING", "kill"), (KILLED, "STOPPED")),
    "stop, then stop now": (*UP, (STOP, "DRAINING"), (STOP_NOW, "STOPPING", "kill"), (KILLED, "STOPPED")),
    "stop now with nothing running": ((STOP_NOW, "STOPPED"),),
    "stop while it waits for the next try": (
        *UP,
        (CRASH, "STARTING", "spawn 0"),
        (CRASH, "BACKOFF"),
        (STOP, "STOPPED"),
    ),
    "stop, then start: it starts when the old one has gone": (
        *UP,
        (STOP, "DRAINING"),
        (START, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STARTING", "spawn 0"),
    ),
    "stop, start, stop": (
        *UP,
        (STOP, "DRAINING"),
        (START, "DRAINING"),
        (STOP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STOPPED"),
    ),
    "restart waits for open requests": (
        *UP,
        (RESTART, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STARTING", "spawn 0"),
        *AGAIN,
    ),
    "restart while it loads": (*UP[:2], (RESTART, "STOPPING", "term"), (CRASH, "STARTING", "spawn 0")),
    "restart of a stopped one starts it": ((RESTART, "STARTING", "spawn 0"),),
    "a death while draining is the end that was wanted": (*UP, (STOP, "DRAINING"), (ABORT, "STOPPED")),
    "the first crash is answered at once": (*UP, (ABORT, "STARTING", "spawn 0"), *AGAIN),
    "crashes in a row wait 0 1 2 4 seconds": (
        *UP,
        (ABORT, "STARTING", "spawn 0"),
        *AGAIN,
        (ABORT, "BACKOFF"),
        (0.9, "BACKOFF"),
        (0.1, "STARTING", "spawn 0"),
        *AGAIN,
        (ABORT, "BACKOFF"),
        (1.9, "BACKOFF"),
        (0.1, "STARTING", "spawn 0"),
        *AGAIN,
        (ABORT, "BACKOFF"),
        (3.9, "BACKOFF"),
        (0.1, "STARTING", "spawn 0"),
    ),
    "60 stable seconds forgive (FC-40)": (
        *UP,
        (ABORT, "STARTING", "spawn 0"),
        *AGAIN,
        (60.0, "READY"),
        (ABORT, "STARTING", "spawn 0"),
    ),
    "a bad flag fails at once (FC-28)": ((START, "STARTING", "spawn 0"), (PERMANENT, "FAILED")),
    "FAILED is left by a start only (FC-26)": (
        (START, "STARTING", "spawn 0"),
        (PERMANENT, "FAILED"),
        (STOP, "FAILED"),
        (STOP_NOW, "FAILED"),
        (READY, "FAILED"),
        (3600.0, "FAILED"),
        (START, "STARTING", "spawn 0"),
    ),
    "exit 0 before it was ready is a failure too (FC-35)": (
        (START, "STARTING", "spawn 0"),
        (CRASH, "STARTING", "spawn 0"),
    ),
    "the same crash twice while starting: once without accelerations": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (ABORT, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 plain"),
        *AGAIN,
    ),
    "what serves without accelerations stays so": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (ABORT, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 plain"),
        *AGAIN,
        (60.0, "READY"),
        (CRASH, "STARTING", "spawn 0 plain"),
        (CRASH, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 plain"),
    ),
    "what does not serve without them goes back to the plan": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (ABORT, "BACKOFF"),
        (1.0, "STARTING", "spawn 0 plain"),
        (ABORT, "BACKOFF"),
        (2.0, "STARTING", "spawn 0"),
    ),
    "two different crashes while starting change nothing": (
        (START, "STARTING", "spawn 0"),
        (ABORT, "STARTING", "spawn 0"),
        (CRASH, "BACKOFF"),
        (1.0, "STARTING", "spawn 0"),
    ),
    "a load that stands still is ended and tried again (FC-26)": (
        *UP[:2],
        (HUNG, "STOPPING", "term"),
        (10.0, "STOPPING", "kill"),
        (KILLED, "STARTING", "spawn 0"),
    ),
    "a wedged engine is ended and tried again (FC-37)": (
        *UP,
        (HUNG, "STOPPING", "term"),
        (10.0, "STOPPING", "kill"),
        (CRASH, "STARTING", "spawn 0"),
        *AGAIN,
        (HUNG, "STOPPING", "term"),
        (CRASH, "BACKOFF"),
    ),
    "a hang whose log names a permanent fault fails": (*UP[:2], (HUNG, "STOPPING", "term"), (PERMANENT, "FAILED")),
    "a hang is no news while it ends": (*UP, (STOP, "DRAINING"), (HUNG, "DRAINING")),
    "out of memory while loading: one rung down (FC-16)": (
        *UP[:2],
        (NVMAP, "STARTING", "spawn 1"),
        (LOADING, "LOADING"),
        (OOM, "STARTING", "spawn 2"),
        *AGAIN,
    ),
    "out of memory while serving: one rung down, at once": (*UP, (OOM, "STARTING", "spawn 1"), *AGAIN),
    "on the last rung three growing pauses, then FAILED (FC-25)": (
        (START, "STARTING", "spawn 2"),
        (OOM, "BACKOFF"),
        (5.0, "STARTING", "spawn 2"),
        (NVMAP, "BACKOFF"),
        (14.0, "BACKOFF"),
        (1.0, "STARTING", "spawn 2"),
        (OOM, "BACKOFF"),
        (44.0, "BACKOFF"),
        (1.0, "STARTING", "spawn 2"),
        (OOM, "FAILED"),
    ),
    "another process lets go during a pause (FC-25)": (
        (START, "STARTING", "spawn 2"),
        (OOM, "BACKOFF"),
        (5.0, "STARTING", "spawn 2"),
        *AGAIN,
    ),
    "memory that runs out again and again on the last rung ends (FC-25)": (
        (START, "STARTING", "spawn 2"),
        *AGAIN,
        (OOM, "BACKOFF"),
        (5.0, "STARTING", "spawn 2"),
        *AGAIN,
        (OOM, "BACKOFF"),
        (15.0, "STARTING", "spawn 2"),
        *AGAIN,
        (OOM, "BACKOFF"),
        (45.0, "STARTING", "spawn 2"),
        *AGAIN,
        (OOM, "FAILED"),
    ),
    "a restart tries the planned rung again": (
        *UP[:2],
        (OOM, "STARTING", "spawn 1"),
        *AGAIN,
        (RESTART, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STARTING", "spawn 0"),
    ),
    "SIGKILL while loading, without evidence: once more, then one rung down": (
        *UP[:2],
        (KILLED, "STARTING", "spawn 0"),
        (LOADING, "LOADING"),
        (KILLED, "STARTING", "spawn 1"),
    ),
    "SIGKILL while serving is a crash: same rung": (*UP, (KILLED, "STARTING", "spawn 0"), *AGAIN),
    "a late driver: three more tries bring the GPU back (FC-74)": (
        (START, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "BACKOFF"),
        (1.0, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "BACKOFF"),
        (2.0, "STARTING", "spawn 0"),
        *AGAIN,
    ),
    "no GPU, fallback = refuse (FC-41, FC-74)": (
        (START, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "BACKOFF"),
        (1.0, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "BACKOFF"),
        (2.0, "STARTING", "spawn 0"),
        (GPU_GONE, "BACKOFF"),
        (4.0, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "FAILED"),
    ),
    "no GPU, fallback = cpu, and back when it answers (FC-74)": (
        (START, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "BACKOFF"),
        (1.0, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "BACKOFF"),
        (2.0, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "BACKOFF"),
        (4.0, "STARTING", "spawn 0"),
        (NO_GPU, "STOPPING", "kill"),
        (KILLED, "STARTING", "spawn 3"),
        *AGAIN,
        (BACK, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STARTING", "spawn 0"),
        *AGAIN,
    ),
    "a driver that is too old is not tried three times": (
        (START, "STARTING", "spawn 0"),
        (OLD_DRIVER, "STOPPING", "kill"),
        (KILLED, "FAILED"),
    ),
    "the GPU falls off while serving": (*UP, (GPU_GONE, "BACKOFF"), (1.0, "STARTING", "spawn 0"), *AGAIN),
    "device news for a model that never lost it": (*UP, (BACK, "READY")),
    "strict refuses what is not as planned (FC-23, FC-41)": (
        *UP[:3],
        (REFUSED, "STOPPING", "kill"),
        (KILLED, "FAILED"),
    ),
    "a start while strict refuses is a new try": (
        *UP[:3],
        (REFUSED, "STOPPING", "kill"),
        (START, "STOPPING"),
        (KILLED, "STARTING", "spawn 0"),
    ),
    "asleep until somebody asks": (
        *UP,
        (SLEEP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "SLEEPING"),
        (3600.0, "SLEEPING"),
        (START, "STARTING", "spawn 0"),
        *AGAIN,
    ),
    "a request while it goes to sleep": (
        *UP,
        (SLEEP, "DRAINING"),
        (START, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "STARTING", "spawn 0"),
    ),
    "it sleeps on the rung that fits": (
        *UP,
        (OOM, "STARTING", "spawn 1"),
        *AGAIN,
        (SLEEP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "SLEEPING"),
        (START, "STARTING", "spawn 1"),
    ),
    "a sleeping one is stopped": (
        *UP,
        (SLEEP, "DRAINING"),
        (DRAINED, "STOPPING", "term"),
        (CRASH, "SLEEPING"),
        (STOP, "STOPPED"),
    ),
    "an exit that was told already": (
        (CRASH, "STOPPED"),
        (START, "STARTING", "spawn 0"),
        (PERMANENT, "FAILED"),
        (CRASH, "FAILED"),
    ),
}
LAST_RUNG = {name for name, rows in HISTORIES.items() if rows[0][-1] == "spawn 2"}
CPU = "no GPU, fallback = cpu, and back when it answers (FC-74)"


def shown(effects: tuple[Effect, ...]) -> str:
    names = {WarmUp(): "warm", Terminate(): "term", Kill(): "kill"}
    return ", ".join(
        f"spawn {e.rung}{' plain' if e.plain else ''}" if isinstance(e, Spawn) else names[e] for e in effects
    )


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    machine = on_last_rung() if name in LAST_RUNG else Machine(rungs=3)
    policy, now = WITH_CPU if name == CPU else POLICY, 1000.0
    for number, row in enumerate(HISTORIES[name]):
        event = row[0]
        if isinstance(event, float):
            now, event = now + event, TICK
        machine, effects = step(machine, event, now, policy)
        expected = (row[1], row[2] if len(row) == 3 else "")
        assert (machine.state.value, shown(effects)) == expected, f"row {number}: {row[0]}"


def test_there_are_enough_histories() -> None:
    assert len(HISTORIES) >= 40


def test_wedges_are_counted_and_forgotten_by_a_restart() -> None:
    machine = Machine(state=State.READY, alive=True, ready_since=0.0)
    machine, _ = step(machine, HUNG, 1.0, POLICY)
    assert machine.wedges == 1
    machine, _ = step(machine, CRASH, 2.0, POLICY)
    machine, _ = step(machine, RESTART, 3.0, POLICY)
    machine, _ = step(machine, CRASH, 4.0, POLICY)
    assert (machine.state, machine.wedges) == (State.STARTING, 0)


def test_the_failure_of_a_hang_is_the_hang_unless_the_log_says_more() -> None:
    ready = Machine(state=State.READY, alive=True, ready_since=0.0)
    hung, _ = step(ready, HUNG, 1.0, POLICY)
    plain, _ = step(hung, exited(Fault.CRASH, "hung"), 2.0, POLICY)
    told, _ = step(hung, exited(Fault.OOM, "out_of_memory"), 2.0, POLICY)
    assert plain.failure is not None and plain.failure.kind == "wedged"
    assert told.failure is not None and told.failure.kind == "out_of_memory"


def test_jitter_spreads_a_pause_and_never_shortens_it() -> None:
    policy = Policy()
    assert [policy.backoff(n, 0) for n in (1, 2, 3, 9)] == [0, 1, 2, 60]
    assert 60 < policy.backoff(20, 0.5) <= 66
