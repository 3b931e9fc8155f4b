"""Where a request goes whose engine was lost before it said a word: at most once more to each of two children."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp

from edge.gateway.hold import failed, retry_in_s
from edge.gateway.openai import Fault
from edge.gateway.refused import Refused
from edge.upstream import Endpoint, Upstream

# A child that is dead to us can look alive for a while: its supervisor sees the exit only when all of it is gone, and
# a GPU's memory takes its time.
GRACE_S = 5.0
STEP_S = 0.05


class UpstreamDied(Exception):
    """The engine's connection ended, or never came to be, before the head of the answer was there.

    `unsent`: nobody took the request. `heard`: a part of an answer came, so that asking again could do the work twice.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__)
        self.unsent = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        lost = isinstance(error, (aiohttp.ClientConnectionError, OSError, asyncio.TimeoutError))
        # The half head of an answer, where there was one, stands in place of the message.
        half = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
        self.heard = half or not lost


class Again:
    """The losses of one request. `until_s`: on the loop's clock, when its client's patience and ours ends."""

    def __init__(self, upstream: Upstream, until_s: float) -> None:
        self._upstream = upstream
        self._until_s = until_s
        self._held_by: Endpoint | None = None  # the child that was lost with the request in its hands
        self._losses = 0
        self._missed: Endpoint | None = None  # the child that is gone, or said to be
        self._grace_until_s = 0.0

    async def endpoint(self, lost: Endpoint, died: UpstreamDied) -> Endpoint:
        """Where to send it next. Raises Refused when it may not be sent again, or nobody came to send it to.

        A kept connection may just have been closed by an engine that is well: once more to the same child, then. A
        fresh one is not: that child is dying, whatever its supervisor knows. Each time the request was in the hands of
        a process that ended, so that no work is done twice, and a request that kills engines kills two.
        """
        if lost != self._missed:
            self._missed, self._grace_until_s = lost, asyncio.get_running_loop().time() + GRACE_S
        if died.unsent:
            await asyncio.sleep(STEP_S)
            return self._same(lost, died) or await self._next(died)
        if self._held_by not in (None, lost) or self._losses == 2:
            raise Refused(fault(self._upstream, str(died)))
        self._held_by = lost
        self._losses += 1
        if self._losses == 2:
            while self._same(lost, died) is not None:
                await asyncio.sleep(STEP_S)
            return await self._next(died)
        return self._upstream.endpoint() or await self._next(died)

    def _same(self, lost: Endpoint, died: UpstreamDied) -> Endpoint | None:
        """`lost`, while its supervisor still holds it for ready. Raises Refused when it has done so for too long."""
        if self._upstream.endpoint() != lost:
            return None
        if asyncio.get_running_loop().time() >= min(self._grace_until_s, self._until_s):
            raise Refused(fault(self._upstream, str(died)))
        return lost

    async def _next(self, died: UpstreamDied) -> Endpoint:
        """The restarted child. Raises Refused."""
        there = self._upstream.endpoint()
        if there is not None:
            return there
        left_s = self._until_s - asyncio.get_running_loop().time()
        try:
            status = await asyncio.wait_for(self._upstream.ensure_ready(), max(0.0, left_s))
        except (asyncio.TimeoutError, TimeoutError):
            raise Refused(fault(self._upstream, str(died))) from None
        endpoint = self._upstream.endpoint()
        if endpoint is None:
            raise Refused(replace(failed(status), status=502))
        return endpoint


def fault(upstream: Upstream, why: str) -> Fault:
    """A 502 that says what is known."""
    failure = upstream.status().failure
    kind = failure.kind if failure else "upstream_died"
    hint = failure.hint if failure else "try again; edgellm logs --engine shows the engine's last lines"
    message = f"the engine of model {upstream.model_id!r} ended the connection ({why})"
    return Fault(502, kind, message, hint, retry_in_s(upstream))
