"""The models that hold memory: the pool of this process, and what `ps`, `load` and `unload` ask of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from edge.board.memory import MemorySnapshot, snapshot
from edge.daemon.fleet import Fleet
from edge.errors import EdgeError, UsageError
from edge.plan.prepare import Prepared, config_of
from edge.pool.pool import Pool
from edge.pool.room import held_bytes
from edge.pool.warm_at import PoolModel
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.status import ModelStatus, State


class Restarted(NamedTuple):
    """The ids of the models that a request to restart concerns."""

    restarting: list[str]
    asleep: list[str]  # left as they are


class Residents:
    """The fleet's models as residents of memory.

    `prepared` returns the current plan, None before there is one; `last_ready_s` the seconds of a model's last start.
    """

    def __init__(
        self, fleet: Fleet, prepared: Callable[[], Prepared | None], last_ready_s: Callable[[str], float | None]
    ) -> None:
        self._fleet = fleet
        self._prepared = prepared
        self._last_ready_s = last_ready_s
        self.pool = Pool(
            fleet.handles,
            self._measure,
            self._configured,
            asks_driver=self._asks_driver,
            limit_bytes=self._limit_bytes,
        )

    def add(self, handle: ModelHandle) -> None:
        """Let the pool decide when this model may take memory."""
        handle.admission = self.pool

    def priority(self, model_id: str) -> int:
        """Return the configured priority of a model; 0 before there is a plan."""
        return self._configured(model_id).priority

    async def load(self, model_id: str) -> ModelStatus:
        """Start a model as its first request would, and wait. Raises UsageError, EdgeError if it cannot serve."""
        status = await self._handle(model_id).ensure_ready()
        if status.state is not State.READY:
            failure = status.failure
            raise EdgeError(
                f"{model_id} is {status.state.value}" + (f": {failure.evidence}" if failure else ""),
                failure.hint if failure else "`edgellm restart` starts it again",
            )
        return status

    def unload(self, model_id: str) -> None:
        """Put a model to sleep after its open requests. Raises UsageError."""
        supervisor = self._handle(model_id).supervisor
        if supervisor is not None:
            supervisor.sleep()

    def restart(self, model_id: str | None) -> Restarted:
        """Restart the engine of one model, or of all that do not sleep: together they may be larger than the memory.

        A sleeping model that is named starts as with its first request, once there is room.
        """
        handles = [each for each in self._fleet.handles.values() if each.supervisor is not None]
        asleep = [each for each in handles if model_id is None and each.sleeps]
        chosen = [each for each in handles if each not in asleep and model_id in (None, each.model_id)]
        for handle in chosen:
            handle.restart()
        return Restarted([each.model_id for each in chosen], [each.model_id for each in asleep])

    def row(self, model_id: str, tokens_per_s: float | None) -> dict[str, Any]:
        """Return the fields of `edgellm ps` for one model; unknown values are None. `tokens_per_s`: its last answer."""
        handle = self._fleet.handles.get(model_id)
        supervisor = handle.supervisor if handle is not None else None
        if supervisor is None:
            return {}
        ready = supervisor.machine.state is State.READY
        configured = self._configured(model_id)
        idle_s = self.pool.idle_s(supervisor) if ready else None
        left_s = handle.sleeps_in_s() if handle is not None else None
        return {
            "memory_bytes": held_bytes(supervisor),
            "open_requests": supervisor.traffic.open,
            "tokens_per_s": tokens_per_s,
            "idle_s": None if idle_s is None else round(idle_s, 1),
            "ttl_left_s": None if left_s is None else round(left_s, 1),
            "priority": configured.priority,
            "pin": configured.pin,
            "last_load_s": configured.load_s,
        }

    def _handle(self, model_id: str) -> ModelHandle:
        handles = self._fleet.handles
        found = next((each for name, each in handles.items() if model_id in (name, *each.aliases)), None)
        if found is None:
            raise UsageError(f"no model is called {model_id}", f"served here: {', '.join(handles) or 'none'}")
        return found

    def _measure(self) -> MemorySnapshot:
        prepared = self._prepared()
        return snapshot(Path("/"), prepared.board) if prepared else MemorySnapshot({}, {})

    def _asks_driver(self) -> bool:
        """Return whether memory of discrete GPUs is measured; that of a Jetson is /proc/meminfo's."""
        prepared = self._prepared()
        return prepared is not None and bool(prepared.board.gpus) and not prepared.board.unified_memory

    def _limit_bytes(self) -> int | None:
        prepared = self._prepared()
        return (prepared.config.memory.limit or None) if prepared else None

    def _configured(self, model_id: str) -> PoolModel:
        prepared = self._prepared()
        if prepared is None:
            return PoolModel()
        config = config_of(prepared, model_id)
        handle = self._fleet.handles.get(model_id)
        # The last load of this process first: the record of starts may be of another disk state, weeks ago.
        load_s = handle.last_load_s if handle is not None else None
        return PoolModel(
            config.priority, config.pin, config.warm_at, load_s or self._last_ready_s(model_id), config.return_to
        )
