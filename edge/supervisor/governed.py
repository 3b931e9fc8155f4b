"""A model as the gateway sees it: stopped while the board is at its critical temperature, and nobody wakes it then.

That fewer requests go ahead, or none, is the gateway's own admission; this is about the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from edge.status import Failure, ModelStatus, State
from edge.telemetry.governor import AdmissionLimit
from edge.upstream import Endpoint, Progress, Upstream

RETRY_S = 30.0  # boards cool slowly
TOO_HOT_HINT = "it is started again when the board is cool; a fan or a lower power mode keeps it so"
_RUNS = frozenset({State.STARTING, State.LOADING, State.WARMING, State.READY, State.BACKOFF})


class Governed:
    """An Upstream around another one. `stop` and `start` are those of the engine's supervisor.

    While the engine is stopped for heat requests wait as for a load, and its status says why. It is stopped only if it
    ran, and only then started again. `because`: how warm the board is.
    """

    def __init__(
        self,
        inner: Upstream,
        stop: Callable[[], None],
        start: Callable[[], None],
        because: Callable[[], str] = lambda: "",
    ) -> None:
        self.limit = AdmissionLimit()
        self._inner = inner
        self._stop = stop
        self._start = start
        self._because = because
        self._stopped = False
        self._changed = asyncio.Event()

    def apply(self, limit: AdmissionLimit) -> None:
        """On the event loop."""
        self.limit = limit
        if limit.drain and not self._stopped and self._inner.status().state in _RUNS:
            self._stopped = True
            self._stop()
        elif not limit.drain and self._stopped:
            self._stopped = False
            self._start()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def model_id(self) -> str:
        return self._inner.model_id

    @property
    def aliases(self) -> tuple[str, ...]:
        return self._inner.aliases

    @property
    def slots(self) -> int:
        return self._inner.slots

    @property
    def card(self) -> dict[str, Any]:
        return self._inner.card

    def status(self) -> ModelStatus:
        status = self._inner.status()
        if self._stopped and status.state is State.STOPPED:
            return replace(status, failure=Failure("too_hot", self._because(), TOO_HOT_HINT))
        return status

    def endpoint(self) -> Endpoint | None:
        return None if self.limit.drain else self._inner.endpoint()

    async def ensure_ready(self) -> ModelStatus:
        """Waits for the board to cool, then for the model. FAILED ends the wait at once."""
        while True:
            while self.limit.drain and self._inner.status().state is not State.FAILED:
                await self._changed.wait()
            changed = asyncio.ensure_future(self._changed.wait())
            ready = asyncio.ensure_future(self._inner.ensure_ready())
            try:
                await asyncio.wait({changed, ready}, return_when=asyncio.FIRST_COMPLETED)
                if ready.done() and (not self.limit.drain or ready.result().state is State.FAILED):
                    return ready.result()
            finally:
                changed.cancel()
                ready.cancel()

    def expected_ready_in_s(self) -> float | None:
        return RETRY_S if self.limit.drain else self._inner.expected_ready_in_s()

    def request(self) -> AbstractContextManager[Progress]:
        return self._inner.request()

    def broken(self, generation: int) -> None:
        self._inner.broken(generation)
