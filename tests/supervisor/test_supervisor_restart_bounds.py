"""Random histories: none restarts more than its bound, none ends FAILED with an untried remedy, none leaves a child."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

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
from edge.supervisor.state import LIVE, SupervisorState, step
from edge.supervisor.status import Failure, State

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
# Starts without one that served: each remedy alone and all together, the tries of the worst kind, and those for rungs,
# pauses, kills and the GPU.
BOUND = (
    (len(OFFERED) + 1)
    + POLICY.start_limit
    + 2 * (RUNGS + 1)
    + len(POLICY.allocation_pauses_s)
    + POLICY.device_attempts
    + 2
)
START_S = 60.0  # of each start, as long as stall_s lets one be silent
BOUND_S = 3600.0  # measured: 2,500 s


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
@given(BROKEN, st.booleans())
def test_ten_thousand_histories_that_never_serve_end(fates: list[Fate], cpu: bool) -> None:
    never_serves(fates, cpu)


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
    now, offered = 0.0, set[str]()
    for number in range(10 * BOUND):
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
    assert spawns <= BOUND and now <= BOUND_S, now
    assert offered <= set(machine.tried), "an untried remedy"
    return machine


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.lists(FATES | st.sampled_from(["serves", "memory"]), max_size=60))
def test_in_any_history_restarts_wait_and_no_child_is_left(history: list[Fate | str]) -> None:
    """A start that serves begins a new series: the pauses still grow, so that restarts come at most once a minute."""
    machine, _ = step(SupervisorState(rungs=RUNGS), StartRequested(), 0.0, POLICY)
    now, in_a_row = 0.0, 0
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
        assert in_a_row <= BOUND or machine.state is State.FAILED
