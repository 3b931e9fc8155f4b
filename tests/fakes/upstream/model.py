"""A model as the gateway sees it, driven by the test instead of by a supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from edge.supervisor.status import Failure, ModelStatus, State
from edge.supervisor.upstream import Endpoint


class Moves:
    def __init__(self, answered: list[int]) -> None:
        self.count = 0
        self._answered = answered

    def moved(self) -> None:
        self.count += 1

    def answered(self, generation: int) -> None:
        self._answered.append(generation)


class FakeModel:
    """Implements edge.supervisor.upstream.Upstream."""

    def __init__(
        self, model_id: str = "chat", socket_path: str | None = None, *, aliases: tuple[str, ...] = ()
    ) -> None:
        self.model_id = model_id
        self.aliases = aliases
        self.slots = 4
        self.held = False
        self.routes: tuple[str, ...] | None = None
        self.last_load_s: float | None = None
        self.template_file: str | None = None
        self.model_info: dict[str, Any] = {"n_ctx_train": 8192, "n_params": 134515008, "size": 97280000}
        self.state = ModelStatus(model_id, State.LOADING)
        self.place: Endpoint | None = None
        self.first: Endpoint | None = None  # of an engine that takes its first request
        self.answered: list[int] = []  # generations of engines that answered their first request
        self.waiting = 0
        self.asked = 0  # calls of ensure_ready
        self.looks = 0  # calls of endpoint
        self.open = 0
        self.refused: set[str | None] = set()  # fingerprints
        self.fingerprints: list[str | None] = []
        self.kept_alive: list[float] = []
        self.left_s: float | None = None  # until it sleeps
        self.actions: list[str] = []
        self.expected_s: float | None = None
        self.elapsed: float | None = None  # seconds
        self._change = asyncio.Condition()
        self._generation = 0
        if socket_path is not None:
            self._place(socket_path)

    def _place(self, socket_path: str) -> None:
        self._generation += 1
        self.place = Endpoint(socket_path, self._generation)
        self.first = None
        self.state = replace(self.state, state=State.READY, failure=None)

    async def admits(self, socket_path: str) -> None:
        async with self._change:
            self._generation += 1
            self.first = Endpoint(socket_path, self._generation, first=True)
            self.state = replace(self.state, state=State.WARMING)
            self._change.notify_all()

    async def ready(self, socket_path: str) -> None:
        async with self._change:
            self._place(socket_path)
            self._change.notify_all()

    async def release(self) -> None:
        async with self._change:
            self.held = False
            self._change.notify_all()

    async def lost(self, state: State = State.BACKOFF) -> None:
        async with self._change:
            self.place = self.first = None
            self.state = replace(self.state, state=state)
            self._change.notify_all()

    async def fail(self, kind: str, hint: str) -> None:
        async with self._change:
            self.place = self.first = None
            self.state = replace(self.state, state=State.FAILED, failure=Failure(kind, "/secret/path: log line", hint))
            self._change.notify_all()

    def status(self) -> ModelStatus:
        return self.state

    def endpoint(self, *, first: bool = False) -> Endpoint | None:
        self.looks += 1
        return self.place or (self.first if first else None)

    async def ensure_ready(self, *, first: bool = False) -> ModelStatus:
        self.waiting += 1
        self.asked += 1
        settled = (State.READY, State.FAILED, State.STOPPED)
        try:
            async with self._change:
                await self._change.wait_for(
                    lambda: not self.held and (self.state.state in settled or (first and self.first))
                )
            return self.state
        finally:
            self.waiting -= 1

    def unload(self) -> None:
        self.actions.append("unload")

    def restart(self) -> None:
        self.actions.append("restart")

    def keep_alive(self, seconds: float) -> None:
        self.kept_alive.append(seconds)

    def sleeps_in_s(self) -> float | None:
        return self.left_s

    def expected_ready_in_s(self) -> float | None:
        return self.expected_s

    def elapsed_s(self) -> float | None:
        return self.elapsed

    @contextmanager
    def request(self, fingerprint: Callable[[], str | None] = lambda: None) -> Iterator[Moves]:
        self.open += 1
        self.fingerprints.append(fingerprint())
        try:
            yield Moves(self.answered)
        finally:
            self.open -= 1

    def kills(self, fingerprint: Callable[[], str | None]) -> bool:
        return fingerprint() in self.refused
