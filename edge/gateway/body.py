"""Read request bodies: kept while small, so that they can be sent twice; streamed when large; bounded always."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from edge.gateway.openai import Fault
from edge.gateway.refused import Refused
from edge.gateway.settings import GatewayConfig
from edge.units import KIB, format_bytes

_PIECE_BYTES = 64 * KIB
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Body:
    """One request's body."""

    def __init__(self, request: web.Request, config: GatewayConfig) -> None:
        """Raises RejectedError if the Content-Length is over the limit."""
        self._request = request
        self._limit = config.max_body_bytes
        self._limits = config.limits
        self._parts: list[bytes] = []
        self._seen = 0
        self._began_s: float | None = None
        self.complete = not request.can_read_body
        self.sent = False  # a part that is not kept went to the engine: the body cannot be sent again
        self.fault: Fault | None = None  # the reason for which the stream to the engine was cut short
        length = request.content_length
        if length is not None and length > self._limit:
            raise Refused(self._too_large())

    @property
    def kept_bytes(self) -> int:
        return sum(len(part) for part in self._parts)

    @property
    def data(self) -> bytes | None:
        """The bytes kept so far, the whole body if `complete`; None where there are none."""
        if not self._parts:
            return None
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    async def read(self, at_most: int | None = None, grow: Callable[[int], None] | None = None) -> None:
        """Read and keep until the end, or until more than `at_most` bytes are kept. Raises RejectedError.

        `grow` is called with the size of each part, and may reject it.
        """
        while not self.complete and (at_most is None or self._seen <= at_most):
            part = await self._next()
            if grow is not None:
                grow(len(part))
            self._parts.append(part)

    def payload(self) -> bytes | AsyncIterator[bytes] | None:
        """Return what the engine gets: bytes or a stream of them."""
        data = self.data
        if not self.complete:
            return self._stream()
        return data if data is None or len(data) <= self._limits.replay_bytes else _pieces(data)

    async def _stream(self) -> AsyncIterator[bytes]:
        self.sent = True
        kept, self._parts = self._parts, []
        for part in kept:
            yield part
        while not self.complete:
            try:
                part = await self._next()
            except Refused as refused:
                self.fault = refused.fault  # aiohttp's client replaces the exception by one of its own
                raise
            if part:
                yield part

    async def _next(self) -> bytes:
        """Return the next piece; empty at the end."""
        content = self._request.content
        if self._began_s is None:
            self._began_s = asyncio.get_running_loop().time()
            self._send_continue()
        part = content.read_nowait()
        if not part and not content.at_eof():
            try:
                part = await asyncio.wait_for(content.readany(), self._limits.body_idle_s)
            except (asyncio.TimeoutError, TimeoutError):
                raise Refused(self._too_slow()) from None
        self.complete = content.at_eof()
        self._seen += len(part)
        if self._seen > self._limit:
            raise Refused(self._too_large())
        self._check_pace()
        return part

    def _send_continue(self) -> None:
        """Ask for the body only now: a client that was rejected before this has not sent it."""
        expect = self._request.headers.get("Expect", "")
        transport = self._request.transport
        if expect.lower() == "100-continue" and transport is not None:
            transport.write(CONTINUE)

    def _check_pace(self) -> None:
        if self.complete or self._began_s is None:
            return
        took_s = asyncio.get_running_loop().time() - self._began_s
        if took_s > self._limits.body_idle_s and self._seen < took_s * self._limits.body_bytes_per_s:
            raise Refused(self._too_slow())

    def _too_large(self) -> Fault:
        limit = format_bytes(self._limit)
        return Fault(
            413, "body_too_large", f"the request body is larger than {limit}", "raise max_body_bytes in [gateway]"
        )

    def _too_slow(self) -> Fault:
        return Fault(408, "body_too_slow", "the request body came too slowly", "send it without pauses")


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """Yield a large body in pieces, so that writing it does not block the event loop."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
