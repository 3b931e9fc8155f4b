"""The one owner of a model's engine: a task that takes events, asks the pure machine, and does what it says."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.errors import UnavailableError
from edge.plan.plan import LaunchPlan, ModelPlan
from edge.status import Failure, ModelStatus, State
from edge.supervisor.attempt import Attempt
from edge.supervisor.child import Child, Hygiene, spawn
from edge.supervisor.events import (
    Drained,
    Effect,
    Event,
    Exited,
    Kill,
    Restart,
    Sleep,
    Spawn,
    Start,
    Stop,
    Terminate,
    Tick,
    WarmUp,
)
from edge.supervisor.patterns import Patterns
from edge.supervisor.policy import Fault, Policy
from edge.supervisor.state import ENDING, Machine, Then, step
from edge.supervisor.watch import Traffic, Watch
from edge.upstream import Endpoint

SETTLED = {State.READY, State.FAILED, State.STOPPED}


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every child of this model."""

    policy: Policy = field(default_factory=Policy)
    hygiene: Hygiene = field(default_factory=Hygiene)
    strict: bool = False
    api_key: str | None = None


class Supervisor:
    """One model. Everybody else posts events and reads `status()`; only `run()` touches the machine."""

    def __init__(
        self,
        model: ModelPlan,
        socket_path: Path,
        patterns: Patterns,
        terms: Terms | None = None,
        *,
        on_change: Callable[[Supervisor, Machine, Machine], None] = lambda *_: None,
        on_line: Callable[[str], None] = lambda _: None,
        expected_ready_s: float | None = None,
    ) -> None:
        self.model = model
        chosen = model.ladder.chosen
        self.machine = Machine(rungs=len(model.ladder.plans), home=chosen, rung=chosen)
        self.generation = 0
        self.restarts = 0
        self.turns = 0  # of the owner's loop, for whoever checks that it turns
        self.watch: Watch | None = None
        self.began_s: float | None = None  # of the start in progress; set by whoever asked for it
        self._socket_path = socket_path
        self._patterns = patterns
        self._terms = terms or Terms()
        self._on_change = on_change
        self._on_line = on_line
        self._expected_ready_s = expected_ready_s
        self._events: asyncio.Queue[tuple[int | None, Event]] = asyncio.Queue()
        self._traffic = Traffic()
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    # --- for everybody -----------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        self._events.put_nowait((None, event))

    def start(self) -> None:
        self.post(Start())

    def stop(self, *, now: bool = False) -> None:
        self.post(Stop(now))

    def restart(self) -> None:
        self.post(Restart())

    def nudge(self) -> None:
        """Makes the owner's loop turn once, to see that it does."""
        self.post(Tick())

    def sleep(self) -> None:
        self.post(Sleep())

    async def settled(self, *states: State) -> State:
        """Waits until the machine is in one of the states. At rest its child is gone."""
        while self.machine.state not in states:
            await self._changed.wait()
        return self.machine.state

    # --- Upstream ----------------------------------------------------------------------------------------------------

    @property
    def model_id(self) -> str:
        return self.model.id

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.model.aliases

    @property
    def slots(self) -> int:
        return self._plan.settings.n_parallel

    @property
    def card(self) -> dict[str, Any]:
        meta = self.model.model.meta
        return {
            "n_vocab": meta.n_vocab,
            "n_ctx": self._plan.settings.n_ctx // max(1, self._plan.settings.n_parallel),
            "n_ctx_train": meta.n_ctx_train,
            "n_embd": meta.n_embd,
            "size": meta.tensor_bytes,
            "ftype": self.model.model.quant,
        }

    def status(self) -> ModelStatus:
        m, watch = self.machine, self.watch
        return ModelStatus(
            id=self.model.id,
            state=m.state,
            rung=m.rung,
            degraded=watch.degraded if watch else (),
            gates=watch.attempt.gates.as_status() if watch else {},
            progress=watch.attempt.progress if watch else None,
            failure=m.failure,
            restarts=self.restarts,
            pid=watch.child.pid if watch and m.alive else None,
        )

    def endpoint(self) -> Endpoint | None:
        if self.machine.state is not State.READY:
            return None
        return Endpoint(str(self._socket_path), self.generation, self._terms.api_key)

    async def ensure_ready(self) -> ModelStatus:
        while True:
            m = self.machine
            leaving = m.state in ENDING and m.then is Then.STOP
            if leaving or m.state in SETTLED:
                return self.status()
            if m.state is State.SLEEPING or m.then is Then.SLEEP:
                self.start()
            await self._changed.wait()

    def expected_ready_in_s(self) -> float | None:
        if self._expected_ready_s is None or self.began_s is None:
            return self._expected_ready_s
        return max(0.0, self._expected_ready_s - (time.monotonic() - self.began_s))

    @contextmanager
    def request(self) -> Iterator[_Open]:
        self._traffic.open += 1
        self._traffic.moved_s = time.monotonic()
        try:
            yield _Open(self._traffic)
        finally:
            self._traffic.open -= 1
            if self._traffic.open == 0 and self.machine.state is State.DRAINING:
                self.post(Drained())

    def broken(self, generation: int) -> None:
        """The exit is seen by its pidfd at once; there is nothing to hurry."""

    # --- the owner ---------------------------------------------------------------------------------------------------

    def adopt(self, child: Child) -> None:
        """Takes the child that the launcher spawned before there was a loop. Call before `run()`."""
        machine, effects = step(self.machine, Start(), time.monotonic(), self._terms.policy)
        assert effects == (Spawn(machine.rung),)
        self._become(machine)
        self._attend(child, self._plan)

    async def run(self) -> None:
        """Never returns; cancel it once `settled(STOPPED, FAILED)`."""
        try:
            while True:
                generation, event = await self._next()
                self.turns += 1
                if generation is not None and generation != self.generation:
                    continue  # about a child that is buried
                before = self.machine
                machine, effects = step(before, event, time.monotonic(), self._terms.policy)
                self._become(machine)
                for effect in effects:
                    self._do(effect)
                if machine.state is State.DRAINING and self._traffic.open == 0:
                    self.post(Drained())
        finally:
            await self._close_watch()

    async def _next(self) -> tuple[int | None, Event]:
        deadline = self.machine.deadline
        if deadline is None:
            return await self._events.get()
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._events.get(), max(0.0, deadline - time.monotonic()))
        return None, Tick()

    def _become(self, machine: Machine) -> None:
        before, self.machine = self.machine, machine
        if machine != before:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            self._on_change(self, before, machine)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Spawn():
                self._spawn(effect)
            case WarmUp() if self.watch is not None:
                self.watch.warm_up()
            case Terminate():
                self._signal(signal.SIGTERM)
            case Kill():
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.watch is not None:
            self.watch.asked = True
            self.watch.child.send(number)

    def _spawn(self, effect: Spawn) -> None:
        plan = self._plan
        self.restarts += 1
        self.began_s = time.monotonic()
        try:
            child = spawn(plan.argv, plan.env, self._socket_path, self._terms.hygiene)
        except UnavailableError as error:
            failure = Failure("spawn_failed", str(error), error.hint or "see `edgellm doctor`")
            self.post(Exited(Fault.PERMANENT, failure))
            return
        self._attend(child, plan)

    def _attend(self, child: Child, plan: LaunchPlan) -> None:
        self.generation += 1
        generation = self.generation
        if self.watch is not None:
            task = asyncio.create_task(self.watch.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self.watch = Watch(
            child,
            Attempt(plan, self._patterns, child.spawned_at_s, self.model.model.meta.tensor_bytes),
            self._terms.policy,
            self._patterns,
            post=lambda event: self._events.put_nowait((generation, event)),
            on_line=self._on_line,
            traffic=self._traffic,
            role=plan.settings.role,
            chat_template=self.model.model.meta.chat_template,
            strict=self._terms.strict,
            api_key=self._terms.api_key,
        )
        self.watch.start()

    async def _close_watch(self) -> None:
        if self.machine.alive and self.watch is not None:
            self.watch.child.send(signal.SIGKILL)
        if self.watch is not None:
            await self.watch.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._socket_path.unlink(missing_ok=True)

    @property
    def _plan(self) -> LaunchPlan:
        return self.model.ladder.plans[self.machine.rung]


class _Open:
    """One open request."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def moved(self) -> None:
        self._traffic.moved_s = time.monotonic()
