"""Any sequence of events: no stranded waiter, at most one live child, FAILED only left by a start."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from edge.supervisor.state import AT_REST, ENDING, LIVE, SupervisorState, step
from edge.supervisor.status import Failure, State

WHY = Failure("why", "evidence", "hint")
KINDS = st.sampled_from(["a", "b"])
FAULTS = st.sampled_from(list(EngineFault))
REMEDIES = st.lists(st.sampled_from(["r1", "r2", "r3"]), unique=True).map(tuple)


class World(RuleBasedStateMachine):
    """The machine and its child. Events of the child may come late or twice."""

    @initialize(rungs=st.integers(1, 3), cpu=st.booleans(), home=st.integers(0, 2))
    def begin(self, rungs: int, cpu: bool, home: int) -> None:
        home = min(home, rungs - 1)
        self.machine = SupervisorState(rungs=rungs, home=home, rung=home)
        self.policy = Policy(cpu_rung=rungs if cpu else None)
        self.now = 1000.0
        self.child = False

    def post(self, event: Event) -> None:
        before = self.machine
        self.machine, effects = step(before, event, self.now, self.policy)
        for effect in effects:
            if isinstance(effect, Spawn):
                assert not self.child, "a second child beside a live one"
                assert 0 <= effect.rung <= before.rungs
                self.child = True
            elif isinstance(effect, (Kill, Terminate)):
                assert self.child, "a signal without a child"
            else:
                assert isinstance(effect, WarmUp) and self.child
        if before.state is State.FAILED and self.machine.state is not State.FAILED:
            assert isinstance(event, (StartRequested, Restart, MemoryBack))

    @rule(event=st.sampled_from([StartRequested(), Stop(), Stop(now=True), Restart(), Sleep()]))
    def ask(self, event: Event) -> None:
        self.post(event)

    @rule(
        event=st.sampled_from(
            [
                EngineLoading(),
                EngineReady(),
                FirstRequestDue(),
                Warmed(),
                Hung(WHY),
                DeviceMissing(WHY),
                DeviceMissing(WHY, permanent=True),
                DeviceBack(),
                MemoryBack(),
                StartRefused(WHY),
                Drained(),
            ]
        )
    )
    def see(self, event: Event) -> None:
        """Post an observation, also in states that do not expect it."""
        self.post(event)

    @precondition(lambda self: self.child)
    @rule(fault=FAULTS, kind=KINDS, jitter=st.floats(0, 1), remedies=REMEDIES)
    def exit(self, fault: EngineFault, kind: str, jitter: float, remedies: tuple[str, ...]) -> None:
        self.child = False
        self.post(Exited(fault, Failure(kind, "", ""), jitter, remedies))

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 11.0, 45.0, 70.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.post(Tick())

    @invariant()
    def one_child(self) -> None:
        assert self.machine.alive == self.child
        assert self.child == (self.machine.state in LIVE | ENDING)

    @invariant()
    def something_will_move_it(self) -> None:
        """At rest, or with a child that will report, or with a deadline."""
        m = self.machine
        timed = {State.BACKOFF, State.DRAINING, State.STOPPING}
        assert (m.deadline is not None) == (m.state in timed)
        assert m.state in AT_REST or m.state in LIVE or m.state in timed
        assert (m.ready_since is not None) >= (m.state is State.READY)

    def teardown(self) -> None:
        """From any state: if children obey, a waiting request is answered soon."""
        for _ in range(60):
            m = self.machine
            if m.state in {State.READY, State.FAILED, State.STOPPED}:
                return
            if m.state is State.SLEEPING:
                self.post(StartRequested())  # what a waiter does
            elif m.state in ENDING or m.state is State.BACKOFF:
                assert m.deadline is not None
                self.now = max(self.now, m.deadline)
                self.post(Tick())
                if self.child and self.machine.state is State.STOPPING:
                    self.exit(EngineFault.CRASH, "terminated", 0.0, ())
            else:
                self.post({State.STARTING: EngineReady(), State.LOADING: EngineReady()}.get(m.state, Warmed()))
        raise AssertionError(f"a waiter is stranded in {self.machine}")


TestWorld = World.TestCase
TestWorld.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
