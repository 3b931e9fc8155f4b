"""Write comments into an event stream while its request waits, so that clients and proxies keep the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from aiohttp import web

from edge.status import ModelStatus

INTERVAL_S = 5.0  # for a request that asks for comments where `heartbeat_s` is 0


class Heartbeat:
    """Opens the stream after `first_s` and writes a comment each `interval_s`, until stop() or the end of `with`.

    `streams` returns whether the client awaits an event stream. Until the stream is open an error keeps its status.
    """

    def __init__(
        self,
        request: web.Request,
        headers: Callable[[], Mapping[str, str]],
        status: Callable[[], ModelStatus],
        streams: Callable[[], bool],
        *,
        first_s: float,
        interval_s: float,
    ) -> None:
        self._request = request
        self._headers = headers
        self._status = status
        self._streams = streams
        self._first_s = first_s
        self._interval_s = interval_s
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.opened: web.StreamResponse | None = None

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await self._task

    async def stop(self) -> web.StreamResponse | None:
        """End the comments, the last one whole. Return the open stream, None if there is none."""
        assert self._task is not None
        self._stopped.set()
        with contextlib.suppress(ConnectionError):
            await self._task
        return self.opened

    async def _beat(self) -> None:
        pause_s = self._first_s
        while not await self._stopped_within(pause_s):
            if self.opened is None:
                if not self._streams():
                    return
                kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "Server": "edgellm"}
                self.opened = web.StreamResponse(headers={**kind, **self._headers()})
                await self.opened.prepare(self._request)
            await self.opened.write(_comment(self._status()))
            pause_s = self._interval_s

    async def _stopped_within(self, pause_s: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), pause_s)
        return self._stopped.is_set()


def _comment(status: ModelStatus) -> bytes:
    """Return `: waiting LOADING 63 %`. SSE parsers ignore lines that start with a colon (HTML standard 9.2.6)."""
    progress = "" if status.progress is None else f" {status.progress * 100:.0f} %"
    return f": waiting {status.state.value}{progress}\n\n".encode()
