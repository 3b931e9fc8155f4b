"""Run one model's engine: a task takes events, asks the pure state machine and carries out its effects."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge.errors import EdgeError
from edge.linux.timeouts import DeadlineExceeded, within
from edge.plan.plan import LaunchPlan, ModelPlan
from edge.supervisor.degraded import before_start
from edge.supervisor.diagnose import failed_spawn, shot
from edge.supervisor.events import (
    DeviceMissing,
    Effect,
    Event,
    Exited,
    Kill,
    MemoryBack,
    Restart,
    Sleep,
    Spawn,
    StartRequested,
    Stop,
    Terminate,
    Tick,
    Warmed,
    WarmUp,
)
from edge.supervisor.log_patterns import Patterns
from edge.supervisor.memory_wait import GpuHolders, MemoryWait
from edge.supervisor.other_engine import NO_PATTERNS, EngineFoundAt, begin_attempt, begin_watch, place
from edge.supervisor.policy import EngineFault, SupervisorOptions
from edge.supervisor.process import Child, spawn
from edge.supervisor.remedies import Remedies
from edge.supervisor.state import ENDING, AfterExit, Applied, SupervisorState, died, step
from edge.supervisor.status import Failure, ModelStatus, State
from edge.supervisor.traffic import Traffic
from edge.supervisor.upstream import Endpoint
from edge.supervisor.variants import PlanVariants, model_info
from edge.supervisor.watch import Watch

SETTLED = (State.READY, State.FAILED, State.STOPPED)
# Counts the children of this process: a pooled connection to one child must never be used for another.
_generations = itertools.count(1)


class SupervisorCallbacks(Struct, frozen=True):
    """Callbacks of a supervisor. All but `cpu` and `driver` run on the event loop and must not block."""

    on_change: Callable[[Supervisor, SupervisorState, SupervisorState], None] = lambda *_: None  # before, after
    on_line: Callable[[str], None] = lambda _: None  # each log line of the engine
    on_speed: Callable[[Supervisor, float], None] = lambda *_: None  # tokens/s, measured while idle
    remedies: Remedies | None = None  # changes of the plan that may cure a failed start
    cpu: Callable[[], LaunchPlan] | None = None  # plan for the CPU when the GPU stays absent, in a thread; None: refuse
    gpu_holders: GpuHolders = lambda: ()  # processes with memory of a GPU
    gpu_load: Callable[[], float | None] = lambda: None  # 0…1, of the busiest GPU; None unknown
    memory_back: Callable[[Supervisor], None] = lambda each: each.memory_back()  # memory that it waited for is free
    driver: Callable[[], str | None] = lambda: None  # evidence that the GPU's device nodes open, or None


class Supervisor:
    """The supervisor of one model. Callers post events and read `status()`; only `run()` changes the machine."""

    def __init__(
        self,
        model: ModelPlan,
        socket_path: Path,
        patterns: Patterns,
        terms: SupervisorOptions | None = None,
        callbacks: SupervisorCallbacks | None = None,
        *,
        expected_ready_s: float | None = None,
        asleep: bool = False,
        kept: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`kept`: remedies that the last start of this plan needed, with the kinds of failure."""
        self.model = model
        self.terms = terms or SupervisorOptions()
        self.callbacks = callbacks or SupervisorCallbacks()
        self.generation = self.spawns = self.iterations = 0  # iterations of run()'s loop, for the watchdog
        self.watch: Watch | None = None
        self.started_at_s: float | None = None  # of the last start, monotonic
        self.launched = False  # the launcher spawned the first child
        self._socket_path = socket_path
        self._patterns = patterns
        self._expected_ready_s = expected_ready_s
        self._plans = PlanVariants(model, self.callbacks.remedies, self.callbacks.cpu)
        self._policy = replace(self.terms.policy, cpu_rung=self._plans.cpu_rung)
        chosen = model.ladder.chosen
        rest = State.SLEEPING if asleep or not self.terms.preload else State.STOPPED
        self.machine = SupervisorState(
            rungs=self._plans.count, home=chosen, state=rest, rung=chosen, kept=tuple(Applied(*each) for each in kept)
        )
        self._events: asyncio.Queue[tuple[int | None, Event]] = asyncio.Queue()
        self.traffic = Traffic(on_idle=self._idle, on_answer=self._answered)
        self._held = 0  # requests that wait and may be the engine's first
        self._memory = MemoryWait(lambda: self.callbacks.memory_back(self), self.callbacks.gpu_holders)
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._missing: Failure | None = None  # why the GPU is not used
        self._found_at: EngineFoundAt | None = None  # the child of another engine than llama.cpp

    # --- for callers -------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        self._events.put_nowait((None, event))

    def start(self) -> None:
        self.post(StartRequested())

    def stop(self, *, now: bool = False) -> None:
        self.post(Stop(now))

    def restart(self) -> None:
        self.post(Restart())

    def ping(self) -> None:
        """Make `iterations` grow if run() is alive."""
        self.post(Tick())

    def begin(self) -> None:
        """Start, unless the model sleeps until its first request."""
        if self.terms.preload:
            self.start()

    def memory_back(self) -> None:
        """Try again what failed for want of memory, or a larger rung; otherwise it does nothing."""
        self.post(MemoryBack())

    def sleep(self) -> None:
        self.post(Sleep())

    async def settled(self, *states: State) -> State:
        """Wait until the machine is in one of the states. At rest (STOPPED, FAILED, SLEEPING) the child is gone."""
        while self.machine.state not in states:
            await self._changed.wait()
        return self.machine.state

    async def start_and_settle(self) -> State:
        """Start from rest and wait for READY, FAILED or (by another caller) STOPPED."""
        before = self.machine
        self.start()
        while self.machine is before:
            await self._changed.wait()
        return await self.settled(*SETTLED)

    @property
    def plan(self) -> LaunchPlan:
        """The plan of the child, or of the next one; the planned one until that for the CPU is made."""
        if self.watch and self.machine.alive:
            return self.watch.attempt.plan
        rung = self.machine.rung if self._plans.known(self.machine.rung) else self.machine.home
        return self._plans.at(rung, [each.id for each in self.machine.remedies])

    @property
    def restarts(self) -> int:
        return max(0, self.spawns - 1)

    @property
    def asleep(self) -> bool:
        """Whether a READY engine sleeps by itself (`--sleep-idle-seconds`): its next request makes it load again."""
        return self.machine.state is State.READY and self.watch is not None and self.watch.attempt.asleep

    @property
    def on_cpu_instead(self) -> bool:
        """Whether it runs on the CPU because the GPU is absent, not because of memory."""
        return self._missing is not None and self.machine.rung == self._policy.cpu_rung != self.machine.home

    @property
    def as_planned(self) -> bool:
        """Whether it runs the planned rung, with every acceleration."""
        return self.machine.rung == self.machine.home and not self.machine.remedies

    # --- Upstream ----------------------------------------------------------------------------------------------------

    @property
    def model_id(self) -> str:
        return self.model.id

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.model.aliases

    @property
    def slots(self) -> int:
        return self.plan.settings.n_parallel

    @property
    def routes(self) -> tuple[str, ...] | None:
        return self.model.other.routes if self.model.other is not None else None

    @property
    def measured(self) -> dict[str, int]:
        """The most that the last child of an engine beside llama.cpp held, by memory domain; empty if unknown."""
        return self.watch.measured if self.watch is not None else {}

    @property
    def needs_bytes(self) -> dict[str, int]:
        """Bytes by memory domain: as planned, for another engine corrected by what was measured."""
        if self.model.other is not None and self.measured:
            return self.model.other.corrected(self.measured)
        return {domain: budget.required_bytes for domain, budget in self.plan.budget.items()}

    @property
    def model_info(self) -> dict[str, Any]:
        return model_info(self.model, self.plan)

    def status(self) -> ModelStatus:
        m, watch = self.machine, self.watch
        return ModelStatus(
            id=self.model.id,
            state=State.SLEEPING if self.asleep else m.state,
            rung=m.rung,
            degraded=watch.degraded if watch else (),
            gates=watch.attempt.gates.as_status(alive=m.alive) if watch else {},
            progress=watch.attempt.progress if watch and m.alive else None,
            failure=self._memory.explain(m.failure),
            restarts=self.restarts,
            pid=watch.child.pid if watch and m.alive else None,
        )

    def endpoint(self, *, first: bool = False) -> Endpoint | None:
        m, port = self.machine, self._found_at.port if self._found_at is not None else None
        serves = m.state is State.READY or (first and m.admits)
        return Endpoint(str(self._socket_path), self.generation, m.admits, port) if serves else None

    async def ensure_ready(self, *, first: bool = False, start: bool = True) -> ModelStatus:
        self._held += first
        try:
            while True:
                m = self.machine
                leaving = m.state in ENDING and m.then is AfterExit.STOP
                if leaving or m.state in SETTLED or self.endpoint(first=first):
                    return self.status()
                if start and (m.state is State.SLEEPING or m.then is AfterExit.SLEEP):
                    self.start()
                await self._changed.wait()
        finally:
            self._held -= first

    def _answered(self, generation: int) -> None:
        if self.watch is not None and generation == self.generation:
            self.watch.answered.set()

    def expected_ready_in_s(self) -> float | None:
        if self._expected_ready_s is None or self.started_at_s is None:
            return self._expected_ready_s
        return max(0.0, self._expected_ready_s - (time.monotonic() - self.started_at_s))

    # --- the task ----------------------------------------------------------------------------------------------------

    def adopt(self, child: Child, started_at_s: float) -> None:
        """Take over the launcher's child before `run()`. `started_at_s`: the start of the launcher, monotonic."""
        self.launched, self.started_at_s = True, started_at_s
        machine, effects = step(self.machine, StartRequested(), time.monotonic(), self._policy)
        assert effects == (Spawn(machine.rung),), "the launcher spawns no model that needs remedies"
        self._become(machine)
        self.spawns += 1
        self._attend(child, self._plans.at(machine.rung))

    async def run(self) -> None:
        """Handle events until cancelled; a child that lives then is killed."""
        try:
            while True:
                generation, event = await self._next()
                self.iterations += 1
                if generation is not None and generation != self.generation:
                    continue  # of an earlier child
                machine, effects = step(self.machine, event, time.monotonic(), self._policy)
                self._note(event)
                self._become(machine)
                for effect in effects:
                    self._do(effect)
                self._idle()
        finally:
            self._memory.end()
            await self._close_watch()

    async def _next(self) -> tuple[int | None, Event]:
        deadline = self.machine.deadline
        if deadline is None:
            return await self._events.get()
        with suppress(DeadlineExceeded):
            return await within(self._events.get(), deadline - time.monotonic())
        return None, Tick()

    def _note(self, event: Event) -> None:
        """Keep why the GPU is not used: the machine clears a failure at READY."""
        if isinstance(event, DeviceMissing) or (isinstance(event, Exited) and event.fault is EngineFault.DEVICE):
            self._missing = event.failure
        elif isinstance(event, Warmed) and self.machine.rung != self._policy.cpu_rung:
            self._missing = None

    def _idle(self) -> None:
        if self.machine.state is State.DRAINING and self.traffic.open == 0 and self.watch is not None:
            self.watch.drained()

    def _become(self, machine: SupervisorState) -> None:
        before, self.machine = self.machine, machine
        if machine != before:
            if before.admitted and died(before, machine) and not shot(machine.failure):
                self.traffic.engine_died()
            self._memory.follow(short=machine.short_of_memory, served=machine.state is State.READY)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            self.callbacks.on_change(self, before, machine)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Spawn():
                self._spawn(effect)
            case WarmUp() if self.watch is not None:
                self.watch.warm_up()
            case Terminate() | Kill():
                self._signal(signal.SIGTERM if isinstance(effect, Terminate) else signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        self._plans.abandon()
        if self.watch is not None:
            self.watch.signalled = True
            self.watch.child.send(number)

    def _spawn(self, effect: Spawn) -> None:
        self.spawns += 1
        self.started_at_s = time.monotonic()
        if self._plans.known(effect.rung):
            self._launch(effect)
        else:
            self._leave_watch()
            self._plans.plan_on_cpu(effect.rung, partial(self._launch, effect))

    def _launch(self, effect: Spawn) -> None:
        try:
            plan = self._plans.at(effect.rung, effect.remedies)
            self._found_at = place(self.model.other)
            argv = self._plans.argv_now(plan) if self._found_at is None else self._found_at.command(plan.argv)
            self._attend(spawn(argv, plan.env, self._socket_path, self.terms.limits), plan)
        except EdgeError as error:
            found = failed_spawn(error)
            self.post(Exited(found.fault, found.failure))

    def _leave_watch(self) -> None:
        """Close the watch of the last child; what it still posts has another generation and is ignored."""
        self.generation = next(_generations)
        if self.watch is not None:
            task = asyncio.create_task(self.watch.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self.watch = None

    def _attend(self, child: Child, plan: LaunchPlan) -> None:
        self._leave_watch()
        generation = self.generation
        other, policy, meta = self._found_at, self._policy, (plan.model or self.model.model).meta
        self.watch = begin_watch(
            other,
            child,
            begin_attempt(other, plan, self._patterns, child.spawned_at_s, meta, self.terms.capability),
            self._patterns if other is None else NO_PATTERNS,
            self.terms,
            post=lambda event: self._events.put_nowait((generation, event)),
            on_line=self.callbacks.on_line,
            traffic=self.traffic,
            held=lambda: self._held if self.machine.unharmed else 0,
            chat_template=meta.chat_template,
            before=before_start(
                self.terms,
                self._plans.degradations(self.machine.rung, self.machine.remedies),
                self._missing if self.on_cpu_instead else None,
            ),
            remedies=self.callbacks.remedies,
            driver=self.callbacks.driver,
            gpu_load=self.callbacks.gpu_load,
            wedge_s=policy.wedge_again_s if self.machine.wedges else policy.wedge_s,
            on_speed=lambda tokens_s: self.callbacks.on_speed(self, tokens_s),
            memory_back=lambda: self.callbacks.memory_back(self),
        )
        self.watch.start()

    async def _close_watch(self) -> None:
        self._plans.abandon()
        if self.watch is not None:
            if self.machine.alive:
                await self.watch.kill()
            await self.watch.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        # A client that connects to a socket without a listener gets ECONNREFUSED, to none ENOENT: both mean retry.
        with suppress(OSError):  # gone, or on a disk that turned read-only
            self._socket_path.unlink()
