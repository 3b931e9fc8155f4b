"""Apply a new configuration to a running edgellm: plan first, then change model by model; a bad one changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct, field
from msgspec.structs import fields

from edge.config import Config
from edge.daemon.fleet import Fleet, terms_of
from edge.daemon.planning import PLAN_LIMIT_S, freed_bytes, no_plan
from edge.errors import read_hangs
from edge.linux.procfs import read_usage
from edge.linux.slow_reads import slow_read
from edge.linux.timeouts import DeadlineExceeded, in_thread
from edge.plan.plan import LaunchPlan, ModelPlan
from edge.plan.prepare import HostView, Prepared
from edge.pool.pool import Pool
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.state import LIVE
from edge.supervisor.status import Failure, State
from edge.supervisor.supervisor import Supervisor

# Replace one supervisor of a model by another; if the new one fails, the old one serves on.

_GONE = (State.STOPPED, State.FAILED)
_STOPPED = Failure(
    "stopped", "the new engine was stopped while it started: the board is too hot", "reload once it is cool"
)


class Replacement(Struct, frozen=True):
    """The outcome of a replacement. `how`: beside | after | asleep | back. `failure`: why the new one is not used."""

    how: str
    failure: Failure | None = None


async def blue_green(handle: ModelHandle, old: Supervisor, new: Supervisor) -> Replacement:
    """Start the new engine while the old one serves, then switch."""
    state = await new.start_and_settle()
    if state is not State.READY:
        return Replacement("back", _STOPPED if state is State.STOPPED else new.machine.failure)
    handle.serve(new)
    await _stop(old)
    return Replacement("beside")


async def in_place(handle: ModelHandle, old: Supervisor, new: Supervisor) -> Replacement:
    """Finish open requests on the old engine, stop it, start the new one; on failure start the old one again.

    A new engine that is stopped from outside (the board is too hot) has not failed: it stays in place and starts later.
    """
    # A failed engine is not worth going back to.
    served = old.machine.state is not State.FAILED
    with handle.replacing():
        await _stop(old)
        handle.serve(new)
        failure = await _start(handle, new)
        if failure is None:
            return Replacement("after")
        if not served:  # the old engine had failed too: its replacement shows the newer failure
            return Replacement("after", failure)
        handle.serve(old)
        if await _start(handle, old) is not None:
            old.sleep()  # where it did not even start: its next request asks again
        return Replacement("back", failure)


async def _start(handle: ModelHandle, supervisor: Supervisor) -> Failure | None:
    """Start the supervisor that the handle serves once there is memory. Return the failure where it is not in place."""
    starting: list[asyncio.Future[State]] = []

    def begin() -> None:
        starting.append(asyncio.ensure_future(supervisor.start_and_settle()))

    if handle.admission is None:
        begin()
    elif (refused := await handle.admission.start(handle, begin)) is not None:
        return refused
    await (starting[0] if starting else supervisor.settled(State.READY, *_GONE))
    return supervisor.machine.failure if supervisor.machine.state is State.FAILED else None


async def while_asleep(handle: ModelHandle, old: Supervisor, new: Supervisor) -> Replacement:
    """Replace a sleeping model's supervisor without waking it."""
    with handle.replacing():
        await _stop(old)
        handle.serve(new)
    return Replacement("asleep")


async def _stop(supervisor: Supervisor) -> None:
    """Stop it until it stays stopped: a restart, or a board that cooled down, may start it meanwhile."""
    while True:
        supervisor.stop()
        await supervisor.settled(State.DRAINING, State.STOPPING, *_GONE)
        if await supervisor.settled(*_GONE, State.BACKOFF, *LIVE) in _GONE:
            return


class Changes(Struct, frozen=True):
    """The model ids of a reload, by what happens to them."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class Outcome(Struct):
    """The result of a reload, by model: added, removed, kept, beside, after, asleep, or back and a failure.

    `after_restart`: changed settings that are only read when edgellm starts.
    """

    models: dict[str, str] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    after_restart: tuple[str, ...] = ()

    def note(self, model_id: str, turned: Replacement) -> None:
        self.models[model_id] = turned.how
        if turned.failure is not None:
            self.failures[model_id] = turned.failure

    @property
    def document(self) -> dict[str, Any]:
        failures = {
            name: {"kind": failure.kind, "hint": failure.hint, "evidence": failure.evidence}
            for name, failure in self.failures.items()
        }
        later = list(self.after_restart)
        return {"schema": 1, "models": self.models, "failures": failures, "after_restart": later}


def after_restart(started_with: Config, new: Config) -> tuple[str, ...]:
    """Return the settings that differ and need a restart: those of the sockets, the gateway and the sensors."""
    whole = [name for name in ("listen", "insecure") if getattr(started_with, name) != getattr(new, name)]
    for table in ("gateway", "telemetry", "thermal"):
        old, now = getattr(started_with, table), getattr(new, table)
        whole += [f"{table}.{key.name}" for key in fields(old) if getattr(old, key.name) != getattr(now, key.name)]
    return tuple(whole)


def compare(running: Mapping[str, Supervisor], new: Prepared) -> Changes:
    """Compare the running models with a new plan; a model is kept if the plan would run it no better."""
    models = new.plan.models
    both = [name for name in running if name in models]
    same = {name: _same(running[name], new, models[name]) for name in both}
    return Changes(
        added=tuple(name for name in models if name not in running),
        removed=tuple(name for name in running if name not in models),
        changed=tuple(name for name in both if not same[name]),
        kept=tuple(name for name in both if same[name]),
    )


def _same(old: Supervisor, new: Prepared, model: ModelPlan) -> bool:
    """Return whether the running rung is the one that the new plan chose, or above it."""
    if old.machine.state is State.FAILED or old.on_cpu_instead or old.machine.remedies:
        return False  # a reload is a request for another attempt
    terms = terms_of(new, model, None)
    if _options(old.terms, old.model) != _options(terms, model):
        return False
    if old.model.model.fingerprint != model.model.fingerprint:
        return False
    commands = [_command(plan) for plan in model.ladder.plans[: model.ladder.chosen + 1]]
    return _command(old.plan) in commands


def _options(terms: SupervisorOptions, model: ModelPlan) -> tuple[Any, ...]:
    """Return the options that a supervisor is made with, argv and environment apart."""
    return terms.limits, terms.strict, terms.ttl_s, terms.policy, model.aliases


def _command(plan: LaunchPlan) -> tuple[Any, ...]:
    return (plan.argv, tuple(sorted(plan.env.items())))


def held_bytes(supervisors: list[Supervisor]) -> dict[str, int]:
    """Return the bytes that our engines would free by ending, by memory domain, for a plan that replaces them."""
    held: dict[str, int] = {}
    for supervisor in supervisors:
        watch = supervisor.watch
        if watch is None or not supervisor.machine.alive:
            continue
        vitals = read_usage(watch.child.pid)
        for domain in supervisor.plan.budget:
            size = freed_bytes(supervisor.plan, domain)
            if domain == "host" and vitals is not None:
                size = vitals.rss_anon_bytes
            held[domain] = held.get(domain, 0) + size
    return held


class Reload:
    """Applies plans to a fleet, one at a time. `pool` gives its models their memory."""

    def __init__(self, fleet: Fleet, pool: Pool) -> None:
        self._fleet = fleet
        self._pool = pool
        self._lock = asyncio.Lock()

    async def apply(
        self,
        prepare: Callable[[HostView], Prepared],
        on_added: Callable[[ModelHandle], None],
        adopt: Callable[[Prepared], None],
    ) -> Outcome:
        """Apply the plan of `prepare`, which may raise EdgeError: then nothing has changed.

        `adopt` takes the new plan; `on_added` is called for each model that was not served before.
        """
        async with self._lock:
            fleet = self._fleet
            view = HostView(held_bytes=held_bytes(fleet.supervisors()))
            try:
                prepared = await in_thread(partial(prepare, view), PLAN_LIMIT_S)
            except DeadlineExceeded:
                hung = slow_read(PLAN_LIMIT_S / 2)
                raise read_hangs(hung, PLAN_LIMIT_S, 0.0) if hung else no_plan(PLAN_LIMIT_S) from None
            changes = compare({each.model_id: each for each in fleet.supervisors()}, prepared)
            outcome = Outcome(dict.fromkeys(changes.kept, "kept"))
            for name in changes.removed:
                await self._remove(name)
                outcome.models[name] = "removed"
            adopt(prepared)
            for name in changes.changed:
                outcome.note(name, await self._change(prepared, prepared.plan.models[name]))
            for name in changes.added:
                outcome.note(name, await self._add(prepared, prepared.plan.models[name], on_added))
            return outcome

    async def _remove(self, name: str) -> None:
        # Out of the fleet first: a restart of all models in this moment would start it again, and it would never rest.
        handle = self._fleet.handles.pop(name)
        handle.remove()
        supervisor = handle.supervisor
        assert supervisor is not None
        supervisor.stop()
        await supervisor.settled(State.STOPPED, State.FAILED)
        await self._fleet.dismiss(supervisor)

    async def _add(self, prepared: Prepared, model: ModelPlan, on_added: Callable[[ModelHandle], None]) -> Replacement:
        handle, supervisor = self._fleet.add(prepared, model)
        self._fleet.run(supervisor)
        on_added(handle)
        if supervisor.terms.preload:
            handle.start()
        return Replacement("added")

    async def _change(self, prepared: Prepared, model: ModelPlan) -> Replacement:
        fleet = self._fleet
        handle = fleet.handles[model.id]
        old = handle.supervisor
        assert old is not None
        asleep = handle.sleeps  # or will: its memory is another model's by then
        new = fleet.make(prepared, model, asleep=asleep)
        fleet.run(new)
        if asleep:
            turned = await while_asleep(handle, old, new)
        else:
            turned = await self._replace(handle, old, new)
        gone = old if handle.supervisor is new else new
        if gone.machine.state not in (State.STOPPED, State.FAILED):
            gone.stop(now=True)
            await gone.settled(State.STOPPED, State.FAILED)
        await fleet.dismiss(gone)
        return turned

    async def _replace(self, handle: ModelHandle, old: Supervisor, new: Supervisor) -> Replacement:
        if old.machine.state is State.READY:
            async with self._pool.beside(new) as fits:
                if fits:
                    return await blue_green(handle, old, new)
        return await in_place(handle, old, new)
