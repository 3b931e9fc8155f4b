"""Comments in an event stream while its request waits, for clients that asked for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from aiohttp import web

from edge.status import ModelStatus

INTERVAL_S = 5.0


class Heartbeat:
    """`async with` opens the stream and keeps it warm; the stream stays open after it, for the answer."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        status: Callable[[], ModelStatus],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._request = request
        self._status = status
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "Server": "edgellm"}
        self.response = web.StreamResponse(headers={**kind, **headers})

    async def __aenter__(self) -> web.StreamResponse:
        await self.response.prepare(self._request)
        self._task = asyncio.ensure_future(self._beat())
        return self.response

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await self._task

    async def _beat(self) -> None:
        while True:
            await self.response.write(comment(self._status()))
            await asyncio.sleep(self._interval_s)


def comment(status: ModelStatus) -> bytes:
    """`: waiting LOADING 63 %`: every SSE parser skips it."""
    progress = "" if status.progress is None else f" {status.progress * 100:.0f} %"
    return f": waiting {status.state.value}{progress}\n\n".encode()
