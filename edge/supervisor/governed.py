"""A model as the gateway sees it: stopped while the board is at its critical temperature, and nobody wakes it then.

That fewer requests go ahead, or none, is the gateway's own admission; this is about the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from edge.status import Failure, ModelStatus, State
from edge.telemetry.governor import AdmissionLimit
from edge.upstream import Endpoint, Progress, Upstream

RETRY_S = 30.0  # boards cool slowly
TOO_HOT_HINT = "it is started again when the board is cool; a fan or a lower power mode keeps it so"
_RUNS = frozenset({State.STARTING, State.LOADING, State.WARMING, State.READY, State.BACKOFF})
_REMOVED = Failure("removed", "the model is no longer configured", "GET /v1/models lists the models that are here")


class Engine(Protocol):
    """What can be stopped: a supervisor."""

    def stop(self) -> None: ...


class Governed:
    """An Upstream around another one.

    While the engine is stopped for heat requests wait as for a load, and its status says why. It is stopped only if it
    ran or is about to, and only then started again (`start`). `because`: how warm the board is.
    """

    def __init__(self, inner: Upstream, start: Callable[[], None], because: Callable[[], str] = lambda: "") -> None:
        self.limit = AdmissionLimit()
        self._inner = inner
        self._start = start
        self._because = because
        self._running: set[Engine] = set()
        self._stopped = False
        self._removed = False
        self._changed = asyncio.Event()

    def apply(self, limit: AdmissionLimit) -> None:
        """On the event loop."""
        self.limit = limit
        self._cool()
        if not limit.drain and self._stopped:
            self._stopped = False
            if self._inner.status().state is not State.FAILED:
                self._start()
        self._wake()

    def became(self, engine: Engine, state: State) -> None:
        """Told of each change of each engine of this model, also of one that is not in its place yet.

        What starts while it is too hot (after a crash, a restart, a reload) is stopped as what ran already.
        """
        if state in _RUNS:
            self._running.add(engine)
            self._cool()
        else:
            self._running.discard(engine)

    def remove(self) -> None:
        """The model is gone. Whoever waits for it is told."""
        self._removed = True
        self._wake()

    def _cool(self) -> None:
        if self.limit.drain and self._running:
            self._stopped = True
            running, self._running = self._running, set()
            for engine in running:
                engine.stop()

    def _wake(self) -> None:
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
        if self._removed:
            return replace(status, state=State.FAILED, failure=_REMOVED)
        if self._stopped and status.state is State.STOPPED:
            return replace(status, failure=Failure("too_hot", self._because(), TOO_HOT_HINT))
        return status

    def endpoint(self) -> Endpoint | None:
        return None if self.limit.drain else self._inner.endpoint()

    async def ensure_ready(self) -> ModelStatus:
        """Waits for the board to cool, then for the model. FAILED ends the wait at once."""
        while True:
            while self.limit.drain and self.status().state is not State.FAILED:
                await self._changed.wait()
            if self._removed:
                return self.status()
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
