"""Request bodies: kept while small, so that they can be sent twice; streamed when large; bounded always."""

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
    """One request's body. `data` is the whole of it once it is known to be complete; None where there is no body."""

    def __init__(self, request: web.Request, config: GatewayConfig) -> None:
        self._request = request
        self._limit = config.max_body_bytes
        self._limits = config.limits
        self._parts: list[bytes] = []
        self._seen = 0
        self._began: float | None = None
        self.complete = not request.can_read_body
        self.sent = False  # a part that is not kept went upstream: it cannot be sent again
        self.fault: Fault | None = None  # why the stream to the upstream was cut short
        length = request.content_length
        if length is not None and length > self._limit:
            raise Refused(self._too_large())

    @property
    def kept_bytes(self) -> int:
        return sum(len(part) for part in self._parts)

    @property
    def data(self) -> bytes | None:
        if not self._parts:
            return None
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    @property
    def replayable(self) -> bool:
        return not self.sent

    async def read(self, at_most: int | None = None, grow: Callable[[int], None] | None = None) -> None:
        """Keeps what comes until the end, or until more than `at_most` bytes are kept. Raises Refused."""
        while not self.complete and (at_most is None or self._seen <= at_most):
            part = await self._next()
            if grow is not None:
                grow(len(part))
            self._parts.append(part)

    def payload(self) -> bytes | AsyncIterator[bytes] | None:
        """What the upstream gets."""
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
                self.fault = refused.fault  # the client library hides it in an error of its own
                raise
            if part:
                yield part

    async def _next(self) -> bytes:
        """The next piece; empty at the end."""
        content = self._request.content
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
            self._say_continue()
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

    def _say_continue(self) -> None:
        """Only now does the client learn that its body is wanted; a refusal before this costs it nothing."""
        expect = self._request.headers.get("Expect", "")
        transport = self._request.transport
        if expect.lower() == "100-continue" and transport is not None:
            transport.write(CONTINUE)

    def _check_pace(self) -> None:
        if self.complete or self._began is None:
            return
        took_s = asyncio.get_running_loop().time() - self._began
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
    """A large body that is held already, so that its sending leaves room for others."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
