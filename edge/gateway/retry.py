"""Decide where to send a request again whose engine was lost before its answer started."""

from __future__ import annotations

import asyncio

from aiohttp.client_exceptions import ClientConnectionError, ServerDisconnectedError

from edge.gateway.openai import HttpFault, RejectedError
from edge.gateway.waiting_room import failed_fault, not_ready_fault, retry_in_s
from edge.supervisor.engine_connection import ConnectFailed
from edge.supervisor.upstream import Endpoint, Upstream

# A dead engine can look READY for a while: its supervisor sees the exit when the kernel has torn the process down, and
# releasing a GPU's memory takes seconds.
GRACE_S = 5.0
STEP_S = 0.05


class UpstreamDied(Exception):
    """The engine's connection ended, or was refused, before the head of the answer was complete.

    `unsent`: no process took the request. `partial`: a part of an answer came, so that a retry could do the work twice.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__)
        self.unsent = isinstance(error, ConnectFailed)
        lost = isinstance(error, (ClientConnectionError, OSError))
        # aiohttp puts a head that was received in part in place of the message.
        partial = isinstance(error, ServerDisconnectedError) and not isinstance(error.message, str)
        # Any other error was raised while parsing, so bytes had come.
        self.partial = partial or not lost


class RetryPolicy:
    """The retries of one request. `until_s`: on the loop's clock, when it may wait no longer."""

    def __init__(self, upstream: Upstream, until_s: float) -> None:
        self._upstream = upstream
        self._until_s = until_s
        self._lost_with: Endpoint | None = None  # the engine that died after it took the request
        self._losses = 0
        self._lost: Endpoint | None = None  # the engine of the last loss, for its grace period
        self._grace_until_s = 0.0

    async def endpoint(self, lost: Endpoint, died: UpstreamDied) -> Endpoint:
        """Return where to send it next. Raises RejectedError if it may not be sent again, or no engine became ready.

        A kept connection may just have been closed by an engine that is well: send it to the same engine, on a new
        connection. A new connection is not closed by a healthy engine: wait for its successor. At most two engines
        get the request, so that one that crashes engines crashes no third.
        """
        if lost != self._lost:
            self._lost, self._grace_until_s = lost, asyncio.get_running_loop().time() + GRACE_S
        if died.unsent:
            await asyncio.sleep(STEP_S)
            return self._same(lost, died) or await self._next(died)
        if self._lost_with not in (None, lost) or self._losses == 2:
            raise RejectedError(died_fault(self._upstream, str(died)))
        self._lost_with = lost
        self._losses += 1
        if self._losses == 2:
            while self._same(lost, died) is not None:
                await asyncio.sleep(STEP_S)
            return await self._next(died)
        return self._upstream.endpoint() or await self._next(died)

    async def proved(self) -> Endpoint:
        """Return the engine once a completion of it came back, after it refused its first request or died of it.

        That counts as no loss: the cause may be the engine. Raises RejectedError.
        """
        left_s = self._until_s - asyncio.get_running_loop().time()
        try:
            status = await asyncio.wait_for(self._upstream.ensure_ready(), max(0.0, left_s))
        except (asyncio.TimeoutError, TimeoutError):
            raise RejectedError(not_ready_fault(self._upstream)) from None
        endpoint = self._upstream.endpoint()
        if endpoint is None:
            raise RejectedError(failed_fault(status))
        return endpoint

    def _same(self, lost: Endpoint, died: UpstreamDied) -> Endpoint | None:
        """Return `lost` while its supervisor still reports it ready. Raises RejectedError after GRACE_S of that."""
        if self._upstream.endpoint() != lost:
            return None
        if asyncio.get_running_loop().time() >= min(self._grace_until_s, self._until_s):
            raise RejectedError(died_fault(self._upstream, str(died)))
        return lost

    async def _next(self, died: UpstreamDied) -> Endpoint:
        """Return the restarted engine. Raises RejectedError."""
        ready = self._upstream.endpoint()
        if ready is not None:
            return ready
        left_s = self._until_s - asyncio.get_running_loop().time()
        try:
            status = await asyncio.wait_for(self._upstream.ensure_ready(), max(0.0, left_s))
        except (asyncio.TimeoutError, TimeoutError):
            raise RejectedError(died_fault(self._upstream, str(died))) from None
        endpoint = self._upstream.endpoint()
        if endpoint is None:
            raise RejectedError(failed_fault(status, 502))
        return endpoint


def died_fault(upstream: Upstream, why: str) -> HttpFault:
    """Return a 502 with the supervisor's failure where it knows one."""
    failure = upstream.status().failure
    kind = failure.kind if failure else "upstream_died"
    hint = failure.hint if failure else "try again; edgellm logs --engine shows the engine's last lines"
    message = f"the engine of model {upstream.model_id!r} ended the connection ({why})"
    return HttpFault(502, kind, message, hint, retry_in_s(upstream))
