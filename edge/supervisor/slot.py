"""The place of one model: who stands in it may change while requests wait (a reload, a GPU that comes back)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from edge.status import ModelStatus
from edge.supervisor.supervisor import Supervisor
from edge.upstream import Endpoint, Progress


class Slot:
    """An Upstream. While `turning()` is held, waiters stay, whatever becomes of who stood here before."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._turned = asyncio.Event()
        self._turned.set()

    @contextmanager
    def turning(self) -> Iterator[None]:
        self._turned.clear()
        try:
            yield
        finally:
            self._turned.set()

    @property
    def turns(self) -> bool:
        return not self._turned.is_set()

    def stop(self) -> None:
        self.supervisor.stop()

    def start(self) -> None:
        self.supervisor.start()

    def begin(self) -> None:
        self.supervisor.begin()

    # --- Upstream ----------------------------------------------------------------------------------------------------

    @property
    def model_id(self) -> str:
        return self.supervisor.model_id

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.supervisor.aliases

    @property
    def slots(self) -> int:
        return self.supervisor.slots

    @property
    def card(self) -> dict[str, Any]:
        return self.supervisor.card

    def status(self) -> ModelStatus:
        return self.supervisor.status()

    def endpoint(self) -> Endpoint | None:
        return self.supervisor.endpoint()

    async def ensure_ready(self) -> ModelStatus:
        while True:
            await self._turned.wait()
            asked = self.supervisor
            status = await asked.ensure_ready()
            if asked is self.supervisor and self._turned.is_set():
                return status

    def expected_ready_in_s(self) -> float | None:
        return self.supervisor.expected_ready_in_s()

    def request(self) -> AbstractContextManager[Progress]:
        return self.supervisor.request()

    def broken(self, generation: int) -> None:
        self.supervisor.broken(generation)
