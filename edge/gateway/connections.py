"""Bound the number of client connections, and the time one may take, between the transport and aiohttp's protocol.

aiohttp bounds a line and a header, but neither the time in which they arrive nor the number of connections.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import cast

from edge.gateway.config import ClientLimits
from edge.gateway.openai import HttpFault

_TICK_S = 1.0  # all limits here are whole seconds; one timer for all connections costs less than one for each


class Connections:
    """The open connections of one gateway. A timer runs only while there are any."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Return a protocol factory for `loop.create_server` that wraps `inner`."""
        return lambda: Connection(self, inner())

    def request_began(self, transport: asyncio.BaseTransport | None) -> None:
        found = self._open.get(transport) if transport is not None else None
        if found is not None:
            found.busy = True

    def request_ended(self, transport: asyncio.BaseTransport | None) -> None:
        found = self._open.get(transport) if transport is not None else None
        if found is not None:
            found.idle_from(asyncio.get_running_loop().time())

    def _join(self, connection: Connection, transport: asyncio.Transport) -> bool:
        if len(self._open) >= self._limits.connections and not self._make_room():
            self.refused += 1
            return False
        self._open[transport] = connection
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        return True

    def _leave(self, transport: asyncio.Transport) -> None:
        self._open.pop(transport, None)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> bool:
        """Abort the connection that has been without a request for longest. Returns False where there is none.

        Never a busy one, nor one so young that it may not have been read yet: behind a socket unit hundreds that
        waited are accepted in one turn of the loop.
        """
        idle = [(each.since_s, transport) for transport, each in self._open.items() if not each.busy]
        since_s, transport = min(idle, key=lambda pair: pair[0], default=(math.inf, None))
        if transport is None or asyncio.get_running_loop().time() - since_s < self._limits.grace_s:
            return False
        self._open.pop(transport, None)
        cast(asyncio.Transport, transport).abort()
        return True

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_S, self._tick) if self._open else None
        now_s = loop.time()
        for transport, connection in list(self._open.items()):
            if connection.overdue(now_s, self._limits):
                cast(asyncio.Transport, transport).abort()


class Connection(asyncio.Protocol):
    """One client connection. `busy` while a request is answered; otherwise idle since `since_s` on the loop's clock."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._refused = False
        self.busy = False
        self.since_s = 0.0
        self._first_byte_s: float | None = None
        self._unsent_bytes = 0
        self._unsent_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.since_s = asyncio.get_running_loop().time()
        if not self._connections._join(self, self._transport):
            self._refused = True
            self._transport.write(_too_many())
            self._transport.close()
            return
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._connections._leave(self._transport)
        if not self._refused:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self.busy and self._first_byte_s is None:
            self._first_byte_s = asyncio.get_running_loop().time()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Treat a half-closed connection as closed: no HTTP client in use sends FIN and then waits for its answer."""
        return None if self._refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        if not self._refused:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if not self._refused:
            self._inner.resume_writing()

    def idle_from(self, now_s: float) -> None:
        self.busy = False
        self.since_s = now_s
        self._first_byte_s = None

    def overdue(self, now_s: float, limits: ClientLimits) -> bool:
        """Return whether the connection has outlived the limit of its phase: answering, receiving headers, or idle."""
        if self.busy:
            return self._stalled(now_s, limits.stall_s)
        if self._first_byte_s is not None:
            return now_s - self._first_byte_s > limits.header_s
        return now_s - self.since_s > limits.idle_s

    def _stalled(self, now_s: float, stall_s: float) -> bool:
        """Return whether the client has taken no byte of its answer for `stall_s`."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent, now_s
            return False
        return now_s - self._unsent_since_s > stall_s


def _too_many() -> bytes:
    """Return a whole HTTP answer: aiohttp's protocol is never attached to a connection over the limit."""
    body = json.dumps(HttpFault(503, "too_many_connections", "too many connections", "close some").document()).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
