"""Random histories: none restarts more than its bound, none ends FAILED with an untried remedy, none leaves a child."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from edge.supervisor.diagnose import Death, diagnose
from edge.supervisor.events import (
    DeviceMissing,
    EngineReady,
    Event,
    Exited,
    Hung,
    MemoryBack,
    Spawn,
    StartRequested,
    Tick,
    Warmed,
)
from edge.supervisor.policy import EngineFault, Policy
from edge.supervisor.process import ExitStatus
from edge.supervisor.state import LIVE, SupervisorState, step
from edge.supervisor.status import Failure, State
from tests.supervisor.rig import PATTERNS
from tests.supervisor.test_supervisor_engine_patterns import LINES
from tests.supervisor.test_supervisor_remedies import PLAN, REMEDIES

POLICY = Policy(jitter=0)
RUNGS = 3
OFFERED = ("r1", "r2", "r3")
KINDS = ("segv", "oom", "killed", "stalled", "flash_attention")


class Fate(Struct, frozen=True):
    """The end of one start: an exit, a stall or a missing GPU."""

    what: str
    fault: EngineFault
    kind: str
    remedies: tuple[str, ...]


FATES = st.builds(
    Fate,
    what=st.sampled_from(["exit", "exit", "exit", "stall", "device"]),
    fault=st.sampled_from(list(EngineFault)),
    kind=st.sampled_from(KINDS),
    remedies=st.lists(st.sampled_from(OFFERED), unique=True).map(tuple),
)
START_S = 60.0  # of each start, as long as stall_s lets one be silent


def diagnosed() -> list[Fate]:
    """Return the fates that `diagnose` makes of each recorded line, under each way for an engine to end."""
    exits = [ExitStatus(1, None, 3.0), *(ExitStatus(None, each, 3.0) for each in (signal.SIGABRT, signal.SIGKILL))]
    deaths = [Death(each, [line]) for lines in LINES.values() for line in lines for each in exits]
    deaths += [replace(death, oom_killed=True) for death in deaths if death.exit.signal == signal.SIGKILL]
    found = [diagnose(death, PATTERNS) for death in deaths]
    kinds = {each.failure.kind: REMEDIES.for_kind(each.failure.kind, PLAN) for each in found}
    return [Fate("exit", each.fault, each.failure.kind, kinds[each.failure.kind]) for each in found]


DIAGNOSED = diagnosed()
ANY = FATES | st.sampled_from(DIAGNOSED)


def bound_of(fates: list[Fate]) -> tuple[int, float]:
    """Return how many starts come without one that served, and within which time.

    Each remedy alone and all together, the tries of the worst kind, and those for rungs, pauses, kills and the GPU.
    """
    remedies = len({one for fate in fates for one in (*fate.remedies, *OFFERED)})
    starts = (
        (remedies + 1)
        + POLICY.start_limit
        + 2 * (RUNGS + 1)
        + len(POLICY.allocation_pauses_s)
        + POLICY.device_attempts
        + 2
    )
    # With OFFERED alone 2,500 s are measured; each further start takes itself and the longest pause.
    return starts, 3600.0 + (remedies - len(OFFERED)) * (START_S + max(POLICY.backoff_s))


def fall(
    machine: SupervisorState, fate: Fate, now: float, policy: Policy
) -> tuple[SupervisorState, list[Spawn], set[str]]:
    """Let one child meet its fate. Return the machine, its spawns and the remedies that were on offer."""
    failure = Failure(fate.kind, "", "")
    offered = tuple(each for each in fate.remedies if each not in {one.id for one in machine.remedies})
    exited: Event = Exited(fate.fault, failure, remedies=offered)
    if fate.what == "stall":
        machine, _ = step(machine, Hung(Failure("stalled", "", "")), now, policy)
    elif fate.what == "device":
        machine, _ = step(machine, DeviceMissing(failure), now, policy)
    machine, effects = step(machine, exited, now, policy)
    # No remedy brings a GPU back: its tries are counted apart.
    curable = fate.what != "device" and fate.fault is not EngineFault.DEVICE
    return machine, [effect for effect in effects if isinstance(effect, Spawn)], set(offered) if curable else set()


BROKEN = st.lists(FATES, min_size=1, max_size=3)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(BROKEN, st.booleans())
def test_starts_that_never_serve_end(fates: list[Fate], cpu: bool) -> None:
    never_serves(fates, cpu)


@pytest.mark.full
@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(st.lists(ANY, min_size=1, max_size=3), st.booleans())
def test_ten_thousand_histories_that_never_serve_end(fates: list[Fate], cpu: bool) -> None:
    never_serves(fates, cpu)


def test_each_recorded_line_over_and_over_ends() -> None:
    """Also two causes in turn, as memory and an acceleration may be."""
    for number, fate in enumerate(DIAGNOSED):
        never_serves([fate], cpu=False)
        never_serves([fate, DIAGNOSED[number // 2]], cpu=True)


def never_serves(fates: list[Fate], cpu: bool) -> None:
    """Play the same fates over and over, as a broken engine or board has them, until FAILED.

    Memory that is back changes nothing before; after a FAILED for want of it, one more series has the same bound.
    """
    policy = replace(POLICY, cpu_rung=RUNGS if cpu else None)
    machine, effects = step(SupervisorState(rungs=RUNGS), StartRequested(), 0.0, policy)
    machine = until_failed(machine, len(effects), fates, policy)
    again, effects = step(machine, MemoryBack(), 0.0, policy)
    assert bool(effects) == machine.short_of_memory
    if effects:
        until_failed(again, len(effects), fates, policy)


def until_failed(machine: SupervisorState, spawns: int, fates: list[Fate], policy: Policy) -> SupervisorState:
    now, offered, (bound, bound_s) = 0.0, set[str](), bound_of(fates)
    for number in range(10 * bound):
        if machine.state is State.FAILED:
            break
        assert step(machine, MemoryBack(), now, policy) == (machine, ())
        if machine.state is State.BACKOFF:
            now = machine.deadline or now
            machine, effects = step(machine, Tick(), now, policy)
            spawns += sum(isinstance(effect, Spawn) for effect in effects)
            continue
        assert machine.state in LIVE and machine.alive
        fate = fates[number % len(fates)]
        now += START_S
        machine, more, offered = fall(machine, fate, now, policy)
        spawns += len(more)
    assert machine.state is State.FAILED and not machine.alive, machine
    assert spawns <= bound and now <= bound_s, (spawns, now)
    assert offered <= set(machine.tried), "an untried remedy"
    return machine


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.lists(FATES | st.sampled_from(["serves", "memory"]), max_size=60))
def test_in_any_history_restarts_wait_and_no_child_is_left(history: list[Fate | str]) -> None:
    any_history(history)


@pytest.mark.full
@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(st.lists(ANY | st.sampled_from(["serves", "memory"]), max_size=60))
def test_in_ten_thousand_histories_restarts_wait_and_no_child_is_left(history: list[Fate | str]) -> None:
    any_history(history)


def any_history(history: list[Fate | str]) -> None:
    """A start that serves begins a new series: the pauses still grow, so that restarts come at most once a minute."""
    machine, _ = step(SupervisorState(rungs=RUNGS), StartRequested(), 0.0, POLICY)
    now, in_a_row = 0.0, 0
    bound, _ = bound_of([entry for entry in history if isinstance(entry, Fate)])
    for entry in history:
        if machine.state is State.BACKOFF:
            now = machine.deadline or now
            machine, _ = step(machine, Tick(), now, POLICY)
        if entry == "memory":
            machine, _ = step(machine, MemoryBack(), now, POLICY)
            in_a_row = 0
        elif machine.state in LIVE and isinstance(entry, Fate):
            machine, _, offered = fall(machine, entry, now, POLICY)
            assert machine.state is not State.FAILED or offered <= set(machine.tried), "an untried remedy"
            in_a_row += 1
        elif machine.state in LIVE:
            machine, _ = step(machine, EngineReady(), now, POLICY)
            machine, _ = step(machine, Warmed(), now, POLICY)
            in_a_row = 0
        assert machine.alive == (machine.state in LIVE)
        assert in_a_row <= bound or machine.state is State.FAILED
