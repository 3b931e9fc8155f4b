"""Named event histories of the machine. Each row: what happens, the state after it, what is done about it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from edge.supervisor.events import Effect, Kill, Spawn, Terminate, WarmUp
from edge.supervisor.policy import EngineFault, Policy
from edge.supervisor.state import SupervisorState, step
from edge.supervisor.status import State
from tests.supervisor.histories import CRASH, HUNG, LIFE, RESTART, TICK, exited
from tests.supervisor.histories_faults import FAULTS

POLICY = Policy(jitter=0)  # backoff 0 1 2 4 …, stable 60, drain 30, term 10, allocation pauses 5 15 45
WITH_CPU = replace(POLICY, cpu_rung=3)
HISTORIES = LIFE | FAULTS


def on_last_rung(state: State = State.STOPPED) -> SupervisorState:
    return SupervisorState(rungs=3, home=2, rung=2, state=state)


LAST_RUNG = {name for name, rows in HISTORIES.items() if rows[0][-1] == "spawn 2"}
CPU = "no GPU, fallback = cpu, and back when it answers (FC-74)"


def shown(effects: tuple[Effect, ...]) -> str:
    names = {WarmUp(): "warm", Terminate(): "term", Kill(): "kill"}
    return ", ".join(
        f"spawn {e.rung}{' ' + '+'.join(e.remedies) if e.remedies else ''}" if isinstance(e, Spawn) else names[e]
        for e in effects
    )


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name: str) -> None:
    machine = on_last_rung() if name in LAST_RUNG else SupervisorState(rungs=3)
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
    machine = SupervisorState(state=State.READY, alive=True, ready_since=0.0)
    machine, _ = step(machine, HUNG, 1.0, POLICY)
    assert machine.wedges == 1
    machine, _ = step(machine, CRASH, 2.0, POLICY)
    machine, _ = step(machine, RESTART, 3.0, POLICY)
    machine, _ = step(machine, CRASH, 4.0, POLICY)
    assert (machine.state, machine.wedges) == (State.STARTING, 0)


def test_the_failure_of_a_hang_is_the_hang_unless_the_log_says_more() -> None:
    ready = SupervisorState(state=State.READY, alive=True, ready_since=0.0)
    hung, _ = step(ready, HUNG, 1.0, POLICY)
    hung_only, _ = step(hung, exited(EngineFault.CRASH, "hung"), 2.0, POLICY)
    oom, _ = step(hung, exited(EngineFault.OOM, "out_of_memory"), 2.0, POLICY)
    assert hung_only.failure is not None and hung_only.failure.kind == "wedged"
    assert oom.failure is not None and oom.failure.kind == "out_of_memory"


def test_jitter_spreads_a_pause_and_never_shortens_it() -> None:
    policy = Policy()
    assert [policy.backoff(n, 0) for n in (1, 2, 3, 9)] == [0, 1, 2, 60]
    assert 60 < policy.backoff(20, 0.5) <= 66
