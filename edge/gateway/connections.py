"""Bound client connections in number, time and bytes, between the transport and aiohttp's protocol.

aiohttp bounds a line and a header, but neither all headers together, nor the time in which they arrive, nor the number
of connections. When all connections are taken some more are accepted for probes only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable
from typing import cast

from edge.gateway.config import ClientLimits
from edge.gateway.headers import MOST_HEADERS, AllHeads, KeptHeads
from edge.gateway.openai import HttpFault
from edge.gateway.turns import Reads, Turns

_TICK_S = 1.0  # all limits here are whole seconds; one timer for all connections costs less than one for each
# After a rejection the client's bytes are read and dropped for so long: a close with unread bytes is a TCP reset, which
# may take the answer with it.
_LINGER_S = 1.0
_MOST_LINGERING = 64
_UNSENT_BYTES = 16384  # of answers to one client; asyncio's 64 KiB, of TLS 512, were 364 MB of 512 clients
# An upload slower than this, seen over some seconds, gives way to other clients when all connections are taken.
_SLOW_BYTES_PER_S = 16 * 1024
_JUDGED_AFTER_S = 5.0
_HEAD_END = b"\r\n\r\n"
# Of a head that does not end aiohttp sees no more: what it parses takes half as much again, of 512 clients 8 MB.
_OPEN_HEAD_BYTES = 8 * 1024
# asyncio fills a buffer of 256 KiB for each TLS connection (SSLProtocol.max_size, Python 3.11 to 3.14): 512 connections
# took 180 MB before the first byte. A record of TLS holds at most 16 KiB (RFC 8446 5.1).
_TLS_BUFFER_BYTES = 16 * 1024


class Connections:
    """The open connections of one server. A timer runs only while there are any.

    `peer` names whose share a connection counts in, None for no share.
    """

    def __init__(self, limits: ClientLimits, peer: Callable[[asyncio.BaseTransport], str | None] | None = None) -> None:
        self._limits = limits
        self._peer = peer or remote_host
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._peers: Counter[str] = Counter()
        self._handshakes: dict[asyncio.BaseTransport, None] = {}  # in progress, the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self.turns = Turns()
        self.heads = AllHeads()
        self.lingering = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._open)

    def protocol(
        self, inner: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None
    ) -> Callable[[], asyncio.Protocol]:
        """Return a protocol factory for `loop.create_server` that wraps `inner`.

        With `tls` the server itself is a plain one, so that a connection counts from its first byte on, not from the
        end of its handshake.
        """
        if tls is not None:
            sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES  # type: ignore[attr-defined]
        return lambda: Connection(self, inner(), tls)

    def request_began(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        """Note that a request's head has arrived. Return its connection."""
        found = self._open.get(transport) if transport is not None else None
        if found is not None:
            found.answer_from(asyncio.get_running_loop().time())
        return found

    def request_ended(self, transport: asyncio.BaseTransport | None, *, unread: bool = False) -> None:
        """Note that a request was answered. `unread`: bytes of its body still come, which aiohttp reads and drops."""
        found = self._open.get(transport) if transport is not None else None
        if found is not None:
            found.idle_from(asyncio.get_running_loop().time(), unread)

    def uploading(self, transport: asyncio.BaseTransport | None, is_pending: bool, *, is_left: bool = False) -> None:
        """Note whether the body of the connection's request is still on its way. `is_left`: it is read later."""
        found = self._open.get(transport) if transport is not None else None
        if found is not None:
            found.body_pending, found.body_left = is_pending, is_pending or is_left

    def _join(self, connection: Connection, transport: asyncio.Transport) -> bool:
        limits, peer = self._limits, self._peer(transport)
        if peer is not None and self._peers[peer] >= limits.connections_per_peer:
            self.refused += 1
            return False
        if len(self._open) >= limits.connections and not self._make_room():
            if len(self._open) >= limits.connections + limits.probe_connections and not self._make_room(probes=True):
                self.refused += 1
                return False
            connection.probes_only = True
        self._open[transport] = connection
        if peer is not None:
            connection.peer = peer
            self._peers[peer] += 1
        self.turns.connections = len(self._open)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        return True

    def _shakes_hands(self, plain: asyncio.Transport) -> None:
        """Count a handshake, and end the oldest one if there are too many: an unfinished one holds 80 KB."""
        if len(self._handshakes) >= self._limits.handshakes:
            oldest = next(iter(self._handshakes))
            self._leave(oldest)
            cast(asyncio.Transport, oldest).abort()
        self._handshakes[plain] = None

    def _encrypted(self, plain: asyncio.Transport, tls: asyncio.Transport) -> bool:
        """Put the transport of a finished handshake in place of the plain one; False if that was aborted meanwhile."""
        self._handshakes.pop(plain, None)
        connection = self._open.pop(plain, None)
        if connection is not None:
            self._open[tls] = connection
        return connection is not None

    def _leave(self, transport: asyncio.BaseTransport) -> None:
        self._handshakes.pop(transport, None)
        left = self._open.pop(transport, None)
        self.turns.connections = len(self._open)
        if left is not None and left.peer is not None:
            self._peers[left.peer] -= 1
            if self._peers[left.peer] <= 0:
                del self._peers[left.peer]
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_slow_upload(self) -> bool:
        """Abort the connection of a body that crawls, the largest one. Return whether there was one."""
        now_s = asyncio.get_running_loop().time()
        slow = [(each.received_bytes, transport) for transport, each in self._open.items()
                if each.upload_rate(now_s) < _SLOW_BYTES_PER_S]  # fmt: skip
        _, transport = max(slow, key=lambda pair: pair[0], default=(0, None))
        if transport is None:
            return False
        self._leave(transport)
        cast(asyncio.Transport, transport).abort()
        return True

    def _make_room(self, *, probes: bool = False) -> bool:
        """Abort the connection that has been without a request for longest, otherwise the slowest upload.

        Returns False where there is none. Never one so young that it may not have been read yet: behind a socket unit
        hundreds that waited are accepted in one turn of the loop. `probes`: among those kept for probes.
        """
        now_s = asyncio.get_running_loop().time()
        among = [pair for pair in self._open.items() if pair[1].probes_only is probes]
        idle = [(each.since_s, transport) for transport, each in among if not each.busy]
        since_s, transport = min(idle, key=lambda pair: pair[0], default=(math.inf, None))
        grace_s = min(self._limits.grace_s, 0.25) if probes else self._limits.grace_s
        if transport is None or now_s - since_s < grace_s:
            slow = [(each.upload_rate(now_s), transport) for transport, each in among]
            rate, transport = min(slow, key=lambda pair: pair[0], default=(math.inf, None))
            if transport is None or rate >= _SLOW_BYTES_PER_S:
                return False
        self._leave(transport)
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

    def __init__(self, connections: Connections, inner: asyncio.Protocol, tls: ssl.SSLContext | None = None) -> None:
        self._connections = connections
        self._inner = inner
        self._tls = tls
        self._handshake: asyncio.Task[None] | None = None
        self._early: list[bytes] = []  # came with the end of the handshake
        self._reads = Reads(connections.turns, self._parse)
        self.heads = KeptHeads(connections.heads)
        self._transport: asyncio.Transport | None = None
        self._attached = False  # aiohttp's protocol has the transport
        self._dropping = False  # rejected: what still comes is read and dropped
        self.busy = False
        self.peer: str | None = None  # see _peer; set when it has joined
        self.probes_only = False
        self.body_pending = self.body_left = False
        self.since_s = 0.0
        self._first_byte_s: float | None = None
        self._head_bytes = self._head_lines = 0
        self._head_end = b""  # the last bytes of a head that is not complete
        self._head_complete = False
        self._held: list[bytes] = []  # of the first head, until it is complete
        self._is_first = True  # no request has begun
        self.received_bytes = 0  # since the request's head was complete
        self.pipelines = False  # its next request, if there is one, came before the answer to the one before
        self._unsent_bytes = 0
        self._unsent_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._reads.bound(self._transport)
        self.since_s = asyncio.get_running_loop().time()
        if not self._connections._join(self, self._transport):
            if self._tls is not None:
                self._transport.abort()  # an answer would need the handshake first
                return
            self._reject(HttpFault(503, "too_many_connections", "too many connections", "close some"))
        elif self._tls is not None:
            self._handshake = asyncio.ensure_future(self._encrypt(self._transport, self._tls))
        else:
            self._attach(self._transport)

    async def _encrypt(self, plain: asyncio.Transport, tls: ssl.SSLContext) -> None:
        limit_s = self._connections._limits.header_s
        self._connections._shakes_hands(plain)
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                plain, self, tls, server_side=True, ssl_handshake_timeout=limit_s
            )
        except OSError:  # no TLS, too slow, or aborted to make room; ssl.SSLError is one
            plain.abort()
            self._connections._leave(plain)
            return
        if encrypted is None or not self._connections._encrypted(plain, encrypted):
            plain.abort()
            self._connections._leave(plain)  # connection_lost is not called for an abort in the handshake
            return
        self._transport = encrypted
        self.since_s = asyncio.get_running_loop().time()
        self._attach(encrypted)

    def _attach(self, transport: asyncio.Transport) -> None:
        self._attached = True
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self._reads.attach(transport)
        # Not with the first byte: between accept() and a request lies a round trip, in which this costs no time.
        self._inner.connection_made(transport)
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.heads.clear()
        if self._transport is not None:
            self._connections._leave(self._transport)
        if self._attached:
            self._reads.detach()
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass what was read to aiohttp, in this iteration of the event loop or a later one."""
        if self._dropping:
            return
        if not self._attached:
            self._early.append(data)
            return
        if not self.busy and not self._head_complete and (fault := self._take_head(data)) is not None:
            self._reject(fault)
            return
        if self._is_first and not self._head_complete and self._head_bytes > _OPEN_HEAD_BYTES:
            self._held.append(data)
            return
        if self._held:
            data, self._held = b"".join([*self._held, data]), []
        self._reads.received(data)

    def _parse(self, piece: bytes) -> None:
        if self._dropping:
            return
        self.pipelines = False
        self.received_bytes += len(piece) if self.busy else 0
        if self.busy and not self.body_left and not self.heads.add(piece, pipelined=True):
            assert self._transport is not None
            self._transport.abort()  # in the middle of an answer nothing else can be said
            return
        self._inner.data_received(piece)

    def _take_head(self, data: bytes) -> HttpFault | None:
        """Count the bytes of a request's head. Returns a fault if they are too many."""
        if self._first_byte_s is None:
            self._first_byte_s = asyncio.get_running_loop().time()
        # With the last bytes of the chunk before: the blank line may be cut by a TCP segment.
        at = (self._head_end + data).find(_HEAD_END)
        self._head_complete = at >= 0
        taken = len(data) if at < 0 else at + len(_HEAD_END) - len(self._head_end)
        self._head_bytes += taken
        self._head_end = (self._head_end + data)[-3:]
        hint = "send fewer or shorter headers"
        self._head_lines += data[:taken].count(b"\n")
        # The request line and the empty one are no headers.
        if self._head_bytes > self._connections._limits.header_bytes or self._head_lines > MOST_HEADERS + 2:
            return HttpFault(400, "headers_too_large", "the request's headers are too large together", hint)
        if not self.heads.add(data[:taken]):
            return HttpFault(503, "headers_waiting", "the headers of all requests are too large together", hint, 1.0)
        return None

    def eof_received(self) -> bool | None:
        """Treat a half-closed connection as closed: no HTTP client in use sends FIN and then waits for its answer."""
        return None if self._dropping or not self._attached else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._attached:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._attached:
            self._inner.resume_writing()

    def answer_from(self, now_s: float) -> None:
        self.busy = True
        self._is_first = False
        self.since_s = now_s
        self.received_bytes = 0

    def idle_from(self, now_s: float, unread: bool = False) -> None:
        self.busy = self.body_pending = self.body_left = False
        self.heads.answered()
        self.pipelines = True  # until more is read
        self.since_s = now_s
        self._first_byte_s = None
        self._head_bytes, self._head_lines, self._head_end, self._head_complete = 0, 0, b"", unread

    def upload_rate(self, now_s: float) -> float:
        """Return bytes per second of the body that is on its way; infinite where there is none, or it just began."""
        took_s = now_s - self.since_s
        return self.received_bytes / took_s if self.body_pending and took_s >= _JUDGED_AFTER_S else math.inf

    def overdue(self, now_s: float, limits: ClientLimits) -> bool:
        """Return whether the connection has outlived the limit of its phase: answering, receiving headers, or idle."""
        if self.busy:
            return self._stalled(now_s, limits.stall_s)
        most_s = limits.probe_s if self.probes_only else math.inf
        if self._first_byte_s is not None:
            return now_s - self._first_byte_s > min(limits.header_s, most_s)
        return now_s - self.since_s > min(limits.idle_s, most_s)

    def _stalled(self, now_s: float, stall_s: float) -> bool:
        """Return whether the client has taken no byte of its answer for `stall_s`."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        # Any change is progress: the buffer also grows while a client reads slowly.
        if unsent == 0 or unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent, now_s
            return False
        return now_s - self._unsent_since_s > stall_s

    def _reject(self, fault: HttpFault) -> None:
        """Send a whole answer, which aiohttp does not see, and close once the client has had time to read it."""
        transport, connections = self._transport, self._connections
        assert transport is not None
        self._dropping = True
        self.heads.clear()
        transport.write(_answer(fault))
        if not transport.can_write_eof() or connections.lingering >= _MOST_LINGERING:
            transport.close()
            return
        try:
            transport.write_eof()
        except OSError:  # the client is gone already
            transport.abort()
            return
        connections.lingering += 1

        def close() -> None:
            connections.lingering -= 1
            transport.abort()

        asyncio.get_running_loop().call_later(_LINGER_S, close)


def remote_host(transport: asyncio.BaseTransport) -> str | None:
    """Return the client's address; None on loopback and on a unix socket, where a proxy may stand for many clients."""
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return None
    host = str(name[0])
    if host == "127.0.0.1":  # nearly all clients; parsing an address costs 5 µs
        return None
    address = ipaddress.ip_address(host.partition("%")[0])
    # A socket of a unit may serve both families: Python calls ::ffff:127.0.0.1 loopback since 3.13 only.
    address = getattr(address, "ipv4_mapped", None) or address
    return None if address.is_loopback else str(address)


def _answer(fault: HttpFault) -> bytes:
    body = json.dumps(fault.document()).encode()
    reason = "Service Unavailable" if fault.status == 503 else "Bad Request"
    head = f"HTTP/1.1 {fault.status} {reason}\r\nContent-Type: application/json\r\nServer: edgellm\r\n"
    return f"{head}Connection: close\r\nRetry-After: 1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
