"""A model that could not even be planned, behind a socket that must be answered (DESIGN: FAILED stays and explains)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from edge.status import Failure, ModelStatus, State
from edge.upstream import Endpoint, Progress


class FailedUpstream:
    """Answers everybody with the same failure; only a reload or a restart changes it."""

    aliases: tuple[str, ...] = ()
    slots = 1

    def __init__(self, model_id: str, failure: Failure) -> None:
        self.model_id = model_id
        self.card: dict[str, Any] = {}
        self._status = ModelStatus(model_id, State.FAILED, failure=failure)

    def status(self) -> ModelStatus:
        return self._status

    def endpoint(self) -> Endpoint | None:
        return None

    async def ensure_ready(self) -> ModelStatus:
        return self._status

    def expected_ready_in_s(self) -> float | None:
        return None

    def request(self) -> AbstractContextManager[Progress]:
        return nullcontext(_Still())

    def broken(self, generation: int) -> None:
        """There is no child that could break."""


class _Still:
    """Nothing moves where nothing runs."""

    def moved(self) -> None:
        """Nothing to note."""
