"""The models of one running edgellm: a supervisor with its task and its log for each, made from a plan."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge.board import device_nodes
from edge.childlog import ChildLog
from edge.folders import Folders
from edge.lastgood import LastGood, key
from edge.plan.plan import LaunchPlan, ModelPlan
from edge.prepare import Prepared, prepare, without_gpu
from edge.resources import data_dir, load_toml
from edge.status import State
from edge.supervisor.child import Child
from edge.supervisor.model_handle import UNNAMED, ModelHandle
from edge.supervisor.patterns import Patterns
from edge.supervisor.plain import safe_mode
from edge.supervisor.state import Machine
from edge.supervisor.supervisor import Supervisor, SupervisorCallbacks
from edge.terms import terms_of

Changed = Callable[[Supervisor, Machine, Machine], None]


@dataclass(frozen=True, slots=True)
class Crew:
    """One supervisor and the task that runs it."""

    supervisor: Supervisor
    owner: asyncio.Task[None]


class Fleet:
    """The models of one process. `handles` by model id, placeholders included; the first is the default model.

    `broke` is set when a supervisor's task ends by itself, which is a bug: the process must end.
    """

    def __init__(self, folders: Folders, on_change: Changed, last_good: LastGood) -> None:
        self.handles: dict[str, ModelHandle] = {}
        self.logs: dict[str, ChildLog] = {}
        self.broke = asyncio.Event()
        self._folders = folders
        self._on_change = on_change
        self._last_good = last_good
        self._patterns = Patterns(load_toml(data_dir("build") / "llama-server.toml"))
        self._crews: dict[int, Crew] = {}
        self._socket_number = 0

    def supervisors(self) -> list[Supervisor]:
        return [handle.supervisor for handle in self.handles.values() if handle.supervisor is not None]

    def add(
        self, prepared: Prepared, model: ModelPlan, expected_ready_s: float | None = None
    ) -> tuple[ModelHandle, Supervisor]:
        """Add a model, in its placeholder's handle where there is one. `run` and `begin` the supervisor."""
        supervisor = self.make(prepared, model, expected_ready_s)
        handle = self.handles.get(model.id) or self.handles.pop(UNNAMED, None) or ModelHandle(model.id)
        self.handles[model.id] = handle
        handle.serve(supervisor)
        return handle, supervisor

    def drop_placeholders(self) -> None:
        """Remove what is still without a supervisor: the plan that holds now does not name it."""
        for name in [name for name, handle in self.handles.items() if handle.supervisor is None]:
            self.handles.pop(name).remove()

    def make(
        self, prepared: Prepared, model: ModelPlan, expected_ready_s: float | None = None, *, asleep: bool = False
    ) -> Supervisor:
        """Not started yet. A model that is here already gets a socket of its own beside it."""
        engine = prepared.plan.engine
        may_use_cpu = prepared.profile.wishes.fallback == "cpu"
        good = key(model.model.fingerprint, engine.id, model.ladder.chosen)

        def on_speed(supervisor: Supervisor, tokens_s: float) -> None:
            if not supervisor.status().degraded:
                self._last_good.keep(model.id, good, tokens_s)

        callbacks = SupervisorCallbacks(
            on_change=self._on_change,
            on_line=self._log(model.id).add,
            on_speed=on_speed,
            safe_mode=lambda plan: safe_mode(plan, engine, model.model, model.id),
            cpu=(lambda: self._on_cpu(prepared, model.id)) if may_use_cpu else None,
            driver=lambda: _driver(prepared),
        )
        terms = terms_of(prepared, model, self._last_good.tokens_s(model.id, good))
        socket_path = self._socket(model.id)
        return Supervisor(
            model, socket_path, self._patterns, terms, callbacks, expected_ready_s=expected_ready_s, asleep=asleep
        )

    def run(self, supervisor: Supervisor, child: Child | None = None, started_at_s: float = 0.0) -> None:
        """Gives it a task. `child`: what the launcher spawned for it; `started_at_s`: when the launcher began."""
        if child is not None:
            supervisor.adopt(child, started_at_s)
        owner = asyncio.create_task(supervisor.run())
        self._crews[id(supervisor)] = Crew(supervisor, owner)
        owner.add_done_callback(self._ended)

    async def dismiss(self, supervisor: Supervisor) -> None:
        """It is at rest, or shall be ended now."""
        crew = self._crews.pop(id(supervisor), None)
        if crew is not None:
            crew.owner.cancel()
            await asyncio.gather(crew.owner, return_exceptions=True)

    async def stop(self, *, now: bool) -> None:
        """Drain, TERM, KILL by the machines' own deadlines."""
        crews = list(self._crews.values())
        for crew in crews:
            crew.supervisor.stop(now=now)
        await asyncio.gather(*(_over(crew) for crew in crews))

    def kill(self) -> None:
        for crew in self._crews.values():
            crew.supervisor.stop(now=True)

    async def close(self) -> None:
        for crew in list(self._crews.values()):
            await self.dismiss(crew.supervisor)
        for log in self.logs.values():
            log.close()

    def _ended(self, owner: asyncio.Task[None]) -> None:
        if owner.cancelled():
            return
        error = owner.exception()
        if error is not None:
            traceback.print_exception(error)  # a bug: said in full, and the end
        self.broke.set()

    def _log(self, model_id: str) -> ChildLog:
        if model_id not in self.logs:
            name = self._folders.model_socket(model_id).stem
            self.logs[model_id] = ChildLog(self._folders.instance_run / "log", name)
        return self.logs[model_id]

    def _socket(self, model_id: str) -> Path:
        first = self._folders.model_socket(model_id)
        handle = self.handles.get(model_id)
        if handle is None or handle.supervisor is None:
            return first
        self._socket_number += 1
        return first.with_name(f"{first.stem[:28]}~{self._socket_number}.sock")

    def _on_cpu(self, prepared: Prepared, model_id: str) -> LaunchPlan:
        """Raises EdgeError."""
        instead = prepare(without_gpu(prepared.config), self._folders)
        ladder = instead.plan.models[model_id].ladder
        return replace(ladder.plans[ladder.chosen], model=instead.plan.models[model_id].model)


async def _over(crew: Crew) -> None:
    """At rest, or without an owner: a task that broke brings nothing to rest any more."""
    rest = asyncio.create_task(crew.supervisor.settled(State.STOPPED, State.FAILED))
    await asyncio.wait([rest, crew.owner], return_when=asyncio.FIRST_COMPLETED)
    rest.cancel()


def _driver(prepared: Prepared) -> str | None:
    found = device_nodes.check_nodes(prepared.board)
    return found.evidence if found.ready else None
