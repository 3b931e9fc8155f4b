"""Write comments into an event stream while its request waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from aiohttp import web

from edge.status import ModelStatus

INTERVAL_S = 5.0


class Heartbeat:
    """Opens the stream and writes comments until the `async with` ends; the stream stays open for the answer."""

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
            await self.response.write(_comment(self._status()))
            await asyncio.sleep(self._interval_s)


def _comment(status: ModelStatus) -> bytes:
    """Return `: waiting LOADING 63 %`. SSE parsers ignore lines that start with a colon (HTML standard 9.2.6)."""
    progress = "" if status.progress is None else f" {status.progress * 100:.0f} %"
    return f": waiting {status.state.value}{progress}\n\n".encode()
