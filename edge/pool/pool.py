"""Share the memory of one machine among its models: one task decides which engine starts, sleeps or is waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime

from msgspec import Struct, field

from edge.board.memory import MemorySnapshot
from edge.linux.timeouts import DeadlineExceeded, in_thread, within
from edge.pool.read_ahead import ReadAhead, Sleeper
from edge.pool.room import kept_bytes, mapped_bytes, reserve_bytes, room
from edge.pool.schedule import Arrival, Bytes, Claims, PoolDecision, PoolPolicy, Resident, decide, fits
from edge.pool.warm_at import PoolModel, warm_from, warm_now
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.state import AT_REST, ENDING
from edge.supervisor.status import Failure, State
from edge.supervisor.supervisor import Supervisor

# BACKOFF holds no memory and will: a model that restarts keeps its place.
_PRESENT = frozenset({State.STARTING, State.LOADING, State.WARMING, State.READY, State.BACKOFF, *ENDING})
_LOADING = frozenset({State.STARTING, State.LOADING, State.WARMING, State.BACKOFF})
_log = logging.getLogger(__name__)
HINT = "unload or unpin another model, or wait: `edgellm ps` shows what holds memory"


class _Waiter(Struct, eq=False):
    """One request that waits for its model to be admitted, or a start that waits: `begin` starts a model at rest."""

    handle: ModelHandle
    since_s: float
    begin: Callable[[], object] | None = None
    outcome: asyncio.Future[Failure | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Pool:
    """The admission of models to memory. `handles` is the fleet's own mapping, read at each decision.

    `measure` reads the memory now; while `asks_driver` it may block for a moment (NVML), so that it runs in a thread.
    `limit_bytes` bounds the models together in the domain `unified` or `host`; None does not.
    """

    def __init__(
        self,
        handles: Mapping[str, ModelHandle],
        measure: Callable[[], MemorySnapshot],
        model: Callable[[str], PoolModel],
        *,
        asks_driver: Callable[[], bool] = lambda: True,
        limit_bytes: Callable[[], int | None] = lambda: None,
        policy: PoolPolicy | None = None,
    ) -> None:
        self._handles = handles
        self._measure = measure
        self._asks_driver = asks_driver
        self._model = model
        self._limit_bytes = limit_bytes
        self._policy = policy or PoolPolicy()
        self._waiters: list[_Waiter] = []
        self._claims = Claims()
        self._starting: set[str] = set()  # admitted, and not seen STARTING yet
        self._waking: dict[str, float] = {}  # admitted while its engine slept by itself, monotonic
        self._held: frozenset[str] = frozenset()
        self._ready_s: dict[str, float] = {}  # when each was READY last, monotonic
        self._slept_s: dict[str, float] = {}  # when each went to sleep last, monotonic
        self._back: set[str] = set()  # models that come back, if there is room
        self._second: list[Supervisor] = []  # engines that start beside the one that they replace
        self._ahead = ReadAhead()
        self._reading: asyncio.Task[None] | None = None
        self._freed_s = self._measured_s = float("-inf")
        self._kicked = asyncio.Event()

    # --- for handles and the daemon ----------------------------------------------------------------------------------

    async def admit(self, handle: ModelHandle) -> Failure | None:
        """Wait until the model may serve. Return the failure if it cannot be admitted. It may be cancelled."""
        return None if self._may_pass(handle) else await self._wait(_Waiter(handle, time.monotonic()))

    async def start(self, handle: ModelHandle, begin: Callable[[], object]) -> Failure | None:
        """Call `begin`, which starts a model at rest, once there is memory for it. Return the failure if it has none.

        One that is started by a request meanwhile, or is removed, is not started again.
        """
        return await self._wait(_Waiter(handle, time.monotonic(), begin))

    async def may_grow(self, handle: ModelHandle, more: Bytes) -> bool:
        """Return whether a resident may take so much more. Alone it may: its own ladder has rungs for less memory."""
        if all(each.id == handle.model_id for each in self._residents()):
            return True
        return self._fits(await self._look(), more)

    @asynccontextmanager
    async def beside(self, new: Supervisor) -> AsyncIterator[bool]:
        """Claim memory for a second engine of a model; yield whether there is enough. It is claimed until the end."""
        snapshot = await self._look()
        enough = self._fits(snapshot, new.needs_bytes, new)
        if enough:
            self._second.append(new)
        try:
            yield enough
        finally:
            if enough:
                self._second.remove(new)
                self._kicked.set()

    async def _wait(self, waiter: _Waiter) -> Failure | None:
        self._waiters.append(waiter)
        self._kicked.set()
        try:
            return await waiter.outcome
        finally:
            self._waiters.remove(waiter)
            self._kicked.set()

    def holds(self, model_id: str) -> bool:
        """Return whether new requests of a READY model wait.

        Another model has waited for its memory long enough, or its engine sleeps and needs memory to wake.
        """
        supervisor = self._supervisor(model_id)
        return model_id in self._held or (supervisor is not None and self._dozes(supervisor))

    def became(self, supervisor: Supervisor, state: State) -> None:
        """Note a change of state; the schedule is decided again."""
        name = supervisor.model_id
        if state in _PRESENT:
            self._starting.discard(name)
            self._back.discard(name)
        if state in _LOADING:
            self._ahead.end()
        if state is State.READY:
            self._ready_s[name] = time.monotonic()
            if (handle := self._handles.get(name)) is not None and supervisor.started_at_s is not None:
                handle.last_load_s = time.monotonic() - supervisor.started_at_s
        if state is State.SLEEPING:
            self._slept_s[name] = time.monotonic()
            self._back |= {self._model(name).return_to} & self._handles.keys()
        if state in (State.SLEEPING, State.STOPPED, State.FAILED):
            self._freed_s = time.monotonic()
        self._kicked.set()

    async def run(self) -> None:
        """Decide after each event, until cancelled."""
        warming = asyncio.create_task(self._warm())
        try:
            while True:
                self._kicked.clear()
                try:
                    pause_s = await self._decide()
                except Exception:
                    # A request must not wait for a decision that a bug of ours prevents: supervisors decide alone then.
                    _log.exception("the pool could not decide: models start without regard to each other")
                    self._held, pause_s = frozenset(), None
                    for waiter in self._waiters:
                        supervisor = waiter.handle.supervisor
                        if supervisor is not None and not waiter.outcome.done():
                            (waiter.begin or supervisor.start)()
                        _resolve(waiter, None)
                with suppress(DeadlineExceeded):
                    await (self._kicked.wait() if pause_s is None else within(self._kicked.wait(), pause_s))
        finally:
            warming.cancel()
            if self._reading is not None:
                self._reading.cancel()
            self._ahead.end()

    def idle_s(self, supervisor: Supervisor) -> float:
        """Return the seconds since the last byte of an answer, or since READY."""
        return time.monotonic() - max(supervisor.traffic.moved_s, self._ready_s.get(supervisor.model_id, 0.0))

    # --- deciding ----------------------------------------------------------------------------------------------------

    async def _decide(self) -> float | None:
        """Carry out one decision. Return the seconds after which to decide again; None waits for an event."""
        for waiter in self._waiters:
            if self._may_pass(waiter.handle) if waiter.begin is None else not self._at_rest(waiter.handle):
                _resolve(waiter, None)
        waiting = self._arrivals()
        arrivals = waiting or self._returning()
        if not arrivals:
            return 0.0 if self._hold(frozenset()) else None
        residents = self._residents()
        fresh_s = self._measured_s + self._policy.idle_s - time.monotonic()
        if fresh_s > 0 and any(each.leaving for each in residents):
            return fresh_s  # each step of an engine's end comes here, and only the last one frees memory
        snapshot = await self._look()
        self._measured_s, residents = time.monotonic(), self._residents()
        free, whole = self._room(snapshot, residents)
        since_freed_s = time.monotonic() - self._freed_s
        decision = decide(
            residents, arrivals, free, whole, self._policy, since_freed_s=since_freed_s, evict=bool(waiting)
        )
        if waiting or decision == PoolDecision(because=decision.because):
            self._back.clear()  # a request goes first, and what has no room now does not wait for it
        released = self._hold(decision.hold)
        self._carry_out(decision)
        return 0.0 if decision.start or decision.refuse or released else decision.again_s

    def _hold(self, names: frozenset[str]) -> bool:
        """Hold the new requests of these models; return whether others are released, whose waiters may pass now."""
        released, self._held = self._held - names, names
        return bool(released)

    async def _look(self) -> MemorySnapshot:
        # Files of /proc take a millisecond; a thread would cost two changes of context on a busy board.
        return await in_thread(self._measured, None) if self._asks_driver() else self._measured()

    def _fits(self, snapshot: MemorySnapshot, needs: Bytes, *second: Supervisor) -> bool:
        free, _ = self._room(snapshot, self._residents(), *second)
        return all(domain in free for domain, bytes_ in needs.items() if bytes_ > 0) and fits(free, needs)

    def _measured(self) -> MemorySnapshot:
        """Return the memory now. A figure that cannot be read is unknown, which is not held against a model."""
        try:
            return self._measure()
        except OSError:
            return MemorySnapshot({}, {})

    def _carry_out(self, decision: PoolDecision) -> None:
        for victim in decision.sleep:
            if (supervisor := self._supervisor(victim)) is not None:
                supervisor.sleep()
        name = decision.start or decision.refuse
        if name is None:
            return
        failure = Failure("no_room", decision.because, HINT) if decision.refuse else None
        if decision.fits:
            self._freed_s = float("-inf")  # what ended gave its memory back: the next arrival need not wait for it
        if decision.start and (supervisor := self._supervisor(name)) is not None:
            if supervisor.asleep:
                self._waking[name] = time.monotonic()  # its request wakes it
            else:
                self._starting.add(name)
                begins = [each.begin for each in self._waiters if each.handle.model_id == name and each.begin]
                begin = begins[-1] if begins else supervisor.start
                begin()  # the last one: a reload that replaces the model follows the start of its own
        for waiter in self._waiters:
            if waiter.handle.model_id == name:
                _resolve(waiter, failure)

    def _may_pass(self, handle: ModelHandle) -> bool:
        """Return whether a request needs no decision: the model is resident and not held, or has a failure to show."""
        supervisor = handle.supervisor
        if supervisor is None or handle.model_id in self._starting:
            return True
        machine = supervisor.machine
        if machine.state is State.SLEEPING or machine.state in ENDING or self._dozes(supervisor):
            return False
        return machine.state not in _PRESENT or handle.model_id not in self._held

    def _at_rest(self, handle: ModelHandle) -> bool:
        """Return whether a start can begin: the model is still here, without an engine, and none is about to come."""
        name = handle.model_id
        return self._handles.get(name) is handle and name not in self._starting and self._state(name) in AT_REST

    def _dozes(self, supervisor: Supervisor) -> bool:
        """Return whether an engine sleeps by itself and no request was let through to wake it."""
        since_s = self._waking.get(supervisor.model_id)
        # A request that was let through and left before it reached the engine woke nothing.
        let_in = since_s is not None and time.monotonic() - since_s < self._policy.turn_s
        return supervisor.asleep and not supervisor.traffic.open and not let_in

    def _arrivals(self) -> list[Arrival]:
        """Return one arrival for each model that requests or starts wait for, by its first waiter."""
        now_s, found = time.monotonic(), dict[str, Arrival]()
        for waiter in self._waiters:
            name, supervisor = waiter.handle.model_id, waiter.handle.supervisor
            if name in found or supervisor is None or waiter.outcome.done():
                continue
            starts = waiter.begin is not None or supervisor.machine.state is State.SLEEPING
            if starts or self._dozes(supervisor):
                found[name] = self._arrival(supervisor, now_s - waiter.since_s)
        return list(found.values())

    def _arrival(self, supervisor: Supervisor, waited_s: float) -> Arrival:
        name = supervisor.model_id
        return Arrival(name, supervisor.needs_bytes, waited_s, self._model(name).priority)

    def _returning(self) -> list[Arrival]:
        found = [self._supervisor(name) for name in self._back - self._starting]
        return [self._arrival(each, 0.0) for each in found if each and each.machine.state is State.SLEEPING]

    def _state(self, name: str) -> State | None:
        return supervisor.machine.state if (supervisor := self._supervisor(name)) is not None else None

    def _residents(self) -> list[Resident]:
        found = []
        for name, handle in self._handles.items():
            supervisor = handle.supervisor
            if supervisor is not None and (supervisor.machine.state in _PRESENT or name in self._starting):
                found.append(self._resident(name, supervisor))
        for new in self._second:
            serves = new.machine.state is State.READY  # then the old one ends
            found.append(Resident(f"{new.model_id} (new)", new.needs_bytes, loading=not serves, leaving=serves))
        return found

    def _resident(self, name: str, supervisor: Supervisor) -> Resident:
        state, known, dozes = supervisor.machine.state, self._model(name), self._dozes(supervisor)
        return Resident(
            name,
            kept_bytes(supervisor) if dozes else supervisor.needs_bytes,
            loading=state in _LOADING or state in AT_REST or (supervisor.asleep and not dozes),
            leaving=state in ENDING,
            open=supervisor.traffic.open,
            idle_s=self.idle_s(supervisor),
            load_s=known.load_s,
            priority=known.priority,
            pin=known.pin,
        )

    def _room(
        self, snapshot: MemorySnapshot, residents: list[Resident], *second: Supervisor
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return what is free for another model now, and what would be without residents, by domain."""
        more = (*self._second, *second)
        free, whole = room(snapshot, residents, self._supervisors(), more, self._limit_bytes())
        return self._claims.left(residents, free), whole

    def _supervisors(self) -> list[Supervisor]:
        return [each.supervisor for each in self._handles.values() if each.supervisor is not None]

    def _supervisor(self, name: str) -> Supervisor | None:
        return handle.supervisor if (handle := self._handles.get(name)) is not None else None

    # --- warm_at -----------------------------------------------------------------------------------------------------

    async def _warm(self) -> None:
        """Admit each model with a `warm_at` early enough to be warm by then."""
        begun: set[tuple[str, datetime]] = set()
        admitting: set[asyncio.Task[Failure | None]] = set()
        while True:
            now, since_s = datetime.now(), time.monotonic()
            names, pause_s = warm_now(now, {name: self._model(name) for name in self._handles}, begun)
            for name in names:
                task = asyncio.create_task(self.admit(self._handles[name]))
                admitting.add(task)
                task.add_done_callback(admitting.discard)
            if self._reading is None or self._reading.done():  # a dead disk holds it, and must hold no `warm_at`
                self._reading = asyncio.create_task(self._try_read_ahead(now))
            await asyncio.sleep(max(0.0, pause_s - (time.monotonic() - since_s)))

    # --- the next model in the page cache ----------------------------------------------------------------------------

    async def _try_read_ahead(self, now: datetime) -> None:
        try:
            await self._read_ahead(now)
        except Exception:
            _log.exception("no model is read ahead")

    async def _read_ahead(self, now: datetime) -> None:
        """Read the next model ahead while no request waits, none loads or ends and the board is cool. Answers go on."""
        supervisors = self._supervisors()
        changing = any(each.machine.state in _LOADING | ENDING for each in supervisors)
        asleep = [each for each in supervisors if each.machine.state is State.SLEEPING]
        # A cold start read past the page cache: a restart would be as cold.
        cold = [each for each in supervisors if each.machine.state is State.READY and each.plan.cold is not None]
        limited = any(handle.limited for handle in self._handles.values())
        if self._waiters or self._starting or changing or limited or not (asleep or cold):
            return
        snapshot = await in_thread(self._measured, None)
        main = next((name for name in ("unified", "host") if name in snapshot.available_bytes), None)
        if main is not None and not self._waiters:
            mapped = mapped_bytes([each for each in supervisors if each.machine.state is State.READY], main)
            least = reserve_bytes(supervisors, main)
            await self._ahead.look(
                [self._sleeper(each, now) for each in asleep or cold],
                snapshot.available_bytes[main] - mapped - least,
                least,
            )

    def _sleeper(self, supervisor: Supervisor, now: datetime) -> Sleeper:
        name, file = supervisor.model_id, supervisor.plan.model or supervisor.model.model
        begin, slept_at_s = warm_from(now, self._model(name)), self._slept_s.get(name)
        slept_s = None if slept_at_s is None else time.monotonic() - slept_at_s
        return Sleeper(
            name,
            file.shards,
            file.bytes,
            slept_s=0.0 if supervisor.machine.state is State.READY else slept_s,
            warm_in_s=None if begin is None else (begin - now).total_seconds(),
        )


def _resolve(waiter: _Waiter, failure: Failure | None) -> None:
    if not waiter.outcome.done():
        waiter.outcome.set_result(failure)
