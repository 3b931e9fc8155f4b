"""The handle of one model: it stays while its supervisor is planned, replaced, stopped for heat or removed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from msgspec.structs import replace

from edge.errors import DeviceMissingError
from edge.supervisor.state import AT_REST, ENDING, STARTING_STATES, AfterExit
from edge.supervisor.status import Failure, Gate, ModelStatus, State
from edge.supervisor.supervisor import Supervisor
from edge.supervisor.traffic import Fingerprint
from edge.supervisor.upstream import Endpoint, RequestProgress
from edge.supervisor.variants import template_file
from edge.telemetry.governor import AdmissionLimit

UNNAMED = "model"  # id of the placeholder where no model is configured: the plan chooses and names one
HOT_RETRY_S = 30.0  # a heat sink's time constant is tens of seconds: an earlier retry finds the board as hot
TOO_HOT_HINT = "it is started again when the board is cool; a fan or a lower power mode keeps it cool"
# States with a child, or with one about to be spawned.
_RUNNING = frozenset({State.STARTING, State.LOADING, State.WARMING, State.READY, State.BACKOFF})
_log = logging.getLogger(__name__)
_REMOVED = Failure("removed", "the model is no longer configured", "GET /v1/models lists the configured models")


class MemoryAdmission(Protocol):
    """Decides when a model may take memory."""

    async def admit(self, handle: ModelHandle, /) -> Failure | None:
        """Wait until the model may serve; return why it cannot."""
        ...

    async def start(self, handle: ModelHandle, begin: Callable[[], object], /) -> Failure | None:
        """Call `begin`, which starts a model at rest, once there is memory; return why there is none."""
        ...

    async def may_grow(self, handle: ModelHandle, more: Mapping[str, int], /) -> bool:
        """Return whether a model with an engine may take so many bytes more, by memory domain."""
        ...

    def holds(self, model_id: str, /) -> bool:
        """Return whether new requests of a READY model wait, in `admit`."""
        ...


class ModelHandle:
    """An Upstream over the current supervisor of one model.

    Without a supervisor it is a placeholder: requests wait until `serve`, or get the failure of `fail` or `remove`.
    """

    def __init__(
        self,
        model_id: str,
        aliases: tuple[str, ...] = (),
        *,
        supervisor: Supervisor | None = None,
        pending: Failure | None = None,
    ) -> None:
        """`pending`: why there is no supervisor yet."""
        self.supervisor = supervisor
        self.admission: MemoryAdmission | None = None  # None: the supervisor starts whenever a request comes
        self.last_load_s: float | None = None  # seconds from start to READY, of the last start that is known
        self._model_id = model_id
        self._aliases = aliases
        self._pending = pending
        self._failure: Failure | None = None
        self._limit = AdmissionLimit()
        self._heat = ""  # evidence for the last limit
        self._running: set[Supervisor] = set()
        self._stopped_for_heat = False
        self._replacing = False
        self._waking: set[asyncio.Future[Failure | None]] = set()  # starts that wait for memory
        self._changed = asyncio.Event()

    # --- the daemon's side -------------------------------------------------------------------------------------------

    def serve(self, supervisor: Supervisor) -> None:
        """Pass requests to this supervisor from now on, waiting ones included."""
        self.supervisor = supervisor
        self._failure = None
        self._wake()

    def fail(self, failure: Failure) -> None:
        """Answer requests with `failure` until `serve`."""
        self._failure = failure
        self._wake()

    def remove(self) -> None:
        """Answer waiting requests: the model is no longer configured."""
        self.fail(_REMOVED)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Let requests wait for the next supervisor, whatever becomes of the present one."""
        self._replacing = True
        try:
            yield
        finally:
            self._replacing = False
            self._wake()

    def limit_admission(self, limit: AdmissionLimit, reason: str) -> None:
        """Stop the engine while `limit.drain` holds, and start it afterwards if it ran. Call on the event loop.

        The gateway itself admits fewer requests. `reason`: the temperature that set the limit.
        """
        self._limit, self._heat = limit, reason
        self._stop_for_heat()
        if not limit.drain and self._stopped_for_heat:
            self._stopped_for_heat = False
            if self.supervisor is not None and self.supervisor.status().state is State.STOPPED:
                self.start()
            elif self.supervisor is not None and self.supervisor.status().state not in AT_REST:
                self.supervisor.start()
        self._wake()

    @property
    def limited(self) -> bool:
        """Whether heat or power limits what may be done now."""
        return self._limit != AdmissionLimit()

    def supervisor_changed(self, supervisor: Supervisor, state: State) -> None:
        """Note a change of any supervisor of this model, also of one that is to replace the present one.

        An engine that starts while the board is too hot (after a crash, a restart, a reload) is stopped again.
        """
        if state in _RUNNING:
            self._running.add(supervisor)
            self._stop_for_heat()
        else:
            self._running.discard(supervisor)
        self._wake()

    def _stop_for_heat(self) -> None:
        if self._limit.drain and self._running:
            self._stopped_for_heat = True
            running, self._running = self._running, set()
            for supervisor in running:
                supervisor.stop()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- Upstream ----------------------------------------------------------------------------------------------------

    @property
    def model_id(self) -> str:
        return self.supervisor.model_id if self.supervisor else self._model_id

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.supervisor.aliases if self.supervisor else self._aliases

    @property
    def slots(self) -> int:
        return self.supervisor.slots if self.supervisor else 1

    @property
    def routes(self) -> tuple[str, ...] | None:
        return self.supervisor.routes if self.supervisor else None

    @property
    def model_info(self) -> dict[str, Any]:
        return self.supervisor.model_info if self.supervisor else {}

    @property
    def template_file(self) -> str | None:
        return template_file(self.supervisor.model, self.supervisor.plan) if self.supervisor else None

    @property
    def held(self) -> bool:
        return self.admission is not None and self.admission.holds(self.model_id)

    def status(self) -> ModelStatus:
        if self.supervisor is None:
            state = State.FAILED if self._failure else State.STARTING
            failure = self._failure or self._pending
            return ModelStatus(self._model_id, state, gates=_closed(failure), failure=failure)
        status = self.supervisor.status()
        if self._failure is not None:
            return replace(status, state=State.FAILED, failure=self._failure)
        # A model that sleeps is not stopped, but its next request would find it waiting for the board to cool.
        hot = self._stopped_for_heat and status.state is State.STOPPED
        if hot or (self._limit.drain and status.state is State.SLEEPING):
            return replace(status, failure=Failure("too_hot", self._heat, TOO_HOT_HINT))
        return status

    def endpoint(self, *, first: bool = False) -> Endpoint | None:
        return None if self.supervisor is None or self._limit.drain else self.supervisor.endpoint(first=first)

    async def ensure_ready(self, *, first: bool = False) -> ModelStatus:
        while True:
            changed, supervisor, status = self._changed, self.supervisor, self.status()
            if self._failure is not None:
                return status
            if supervisor is None or self._replacing:
                await changed.wait()
            elif self._limit.drain:
                if status.state is State.FAILED:
                    return status
                await changed.wait()
            elif self.admission is not None and (refused := await self.admission.admit(self)):
                return replace(self.status(), state=State.FAILED, failure=refused)
            elif (ready := await self._unless(changed, supervisor, first)) and not changed.is_set():
                return ready

    async def _unless(self, changed: asyncio.Event, supervisor: Supervisor, first: bool) -> ModelStatus | None:
        """Return the status once `ensure_ready` of the supervisor returns; None if `changed` comes first."""
        waiting = asyncio.ensure_future(changed.wait())
        # What the pool admitted it has started: a model that went to sleep since then has to ask it again.
        ready = asyncio.ensure_future(supervisor.ensure_ready(first=first, start=self.admission is None))
        try:
            await asyncio.wait({waiting, ready}, return_when=asyncio.FIRST_COMPLETED)
            return ready.result() if ready.done() else None
        finally:
            waiting.cancel()
            ready.cancel()

    def unload(self) -> None:
        if self.supervisor:
            self.supervisor.sleep()

    @property
    def sleeps(self) -> bool:
        """Whether the model sleeps, or will once its engine has ended."""
        if self.supervisor is None:
            return False
        machine = self.supervisor.machine
        leaves = machine.state in ENDING and machine.then is AfterExit.SLEEP
        return leaves or self.supervisor.status().state is State.SLEEPING

    def restart(self) -> None:
        """Start the engine anew after its open requests. A sleeping model starts as with its first request."""
        if self.supervisor is None:
            return
        if self.sleeps:
            if self.supervisor.asleep:
                self.supervisor.sleep()  # its engine goes; the next one is planned anew
            self._wait_for_memory(self._ready())
        elif self.supervisor.machine.state in AT_REST:
            self.start(afresh=True)
        else:
            self.supervisor.restart()

    def start(self, *, afresh: bool = False) -> None:
        """Start a model at rest once there is memory for it, which may be another model's by now. `afresh`: restart."""

        def begin() -> None:
            current = self.supervisor  # a reload may have replaced it meanwhile
            if current is not None and afresh:
                current.restart()
            elif current is not None:
                current.start()

        if self.admission is None:
            begin()
        else:
            self._wait_for_memory(self.admission.start(self, begin))

    def memory_back(self) -> None:
        """Let a model try again that failed, or went to a smaller rung, for want of memory."""
        supervisor = self.supervisor
        if supervisor is None or self._waking:
            return
        machine = supervisor.machine
        if self.admission is None:
            supervisor.memory_back()
        elif machine.state is State.FAILED and machine.short_of_memory:
            self.start()
        elif machine.state is State.READY and machine.suspected:
            self._wait_for_memory(self._grow(supervisor, self.admission))

    async def _ready(self) -> Failure | None:
        return (await self.ensure_ready()).failure

    async def _grow(self, supervisor: Supervisor, admission: MemoryAdmission) -> Failure | None:
        """Let the engine return to the planned rung if what that needs more is free."""
        ladder, has = supervisor.model.ladder, supervisor.needs_bytes
        budget = ladder.plans[supervisor.machine.home].budget
        more = {domain: each.required_bytes - has.get(domain, 0) for domain, each in budget.items()}
        if await admission.may_grow(self, more):
            supervisor.memory_back()
        return None

    def _wait_for_memory(self, start: Coroutine[None, None, Failure | None]) -> None:
        waking = asyncio.ensure_future(start)
        self._waking.add(waking)  # the event loop keeps no reference to a task
        waking.add_done_callback(self._woken)

    def _woken(self, waking: asyncio.Future[Failure | None]) -> None:
        self._waking.discard(waking)
        failure = None if waking.cancelled() else waking.result()
        if failure is not None:
            _log.warning("%s was not started: %s: %s", self.model_id, failure.kind, failure.evidence)
            if self.supervisor is not None and self.supervisor.machine.state is State.STOPPED:
                self.supervisor.sleep()  # its next request asks again

    def keep_alive(self, seconds: float) -> None:
        if self.supervisor:
            self.supervisor.traffic.keep_alive_s = seconds

    def sleeps_in_s(self) -> float | None:
        supervisor = self.supervisor
        if supervisor is None or supervisor.watch is None or supervisor.machine.state is not State.READY:
            return None
        traffic, own_s = supervisor.traffic, supervisor.plan.own_sleep_s or None  # the engine's own option
        limits = [each for each in (traffic.idle_limit_s(supervisor.terms.ttl_s), own_s) if each is not None]
        since_s = max(traffic.moved_s, supervisor.watch.first_token_s or 0.0)
        idle_s = 0.0 if traffic.open else time.monotonic() - since_s
        return max(0.0, min(limits) - idle_s) if limits else None

    def expected_ready_in_s(self) -> float | None:
        if self._limit.drain:
            return HOT_RETRY_S
        return self.supervisor.expected_ready_in_s() if self.supervisor else None

    def elapsed_s(self) -> float | None:
        began_s = self.supervisor.started_at_s if self.supervisor else None
        if began_s is None or self._limit.drain or self.status().state not in STARTING_STATES:
            return None
        return time.monotonic() - began_s

    def request(self, fingerprint: Fingerprint = lambda: None) -> AbstractContextManager[RequestProgress]:
        return self.supervisor.traffic.request(fingerprint) if self.supervisor else nullcontext(_NoProgress())

    def kills(self, fingerprint: Fingerprint) -> bool:
        return self.supervisor is not None and self.supervisor.traffic.kills(fingerprint)


def _closed(failure: Failure | None) -> dict[str, Gate]:
    """Return the driver's gate where no start was planned for want of a GPU; no other failure belongs to a gate."""
    if failure is None or failure.kind != DeviceMissingError.kind:
        return {}
    # A gate's evidence is public: the further lines name files of the system.
    return {"driver": Gate(evidence=failure.evidence.partition("\n")[0])}


class _NoProgress:
    """The progress of a request that has no engine."""

    def moved(self) -> None:
        """Do nothing: there is no engine whose liveness could be judged."""

    def answered(self, generation: int) -> None:
        """Do nothing: there is no engine that could become READY."""
