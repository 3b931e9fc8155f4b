"""Bound what one iteration of the event loop does for clients that send without a pause, so that probes get between.

asyncio serves every socket that is readable in one iteration: 512 clients that send bodies in chunks of one byte took
0.9 s of each, and aiohttp answers the requests that a client has pipelined (RFC 9112 9.3.2) without returning to the
loop, 32 of each client: `/livez` waited for more than 30 s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_S = 0.005  # an answer of `/livez` takes about four iterations
_MOST_REQUESTS = 16  # a pipelined one takes up to 0.5 ms
# Of a client that is parsed at once, whatever others send: a probe, or a small request.
_AT_ONCE_BYTES = 1 * 1024
_PIECE_BYTES = 8 * 1024  # in chunks of one byte: half a millisecond, and 65 KB in aiohttp if they come with a head
# asyncio reads 256 KiB (_SelectorSocketTransport.max_size, Python 3.10 to 3.14), which 512 connections may hold. More
# than ClientLimits.header_bytes: a head that is too large is rejected before aiohttp has parsed a part of it.
ONE_READ_BYTES = 40 * 1024
# The same of many connections: 512 held 40 MB of what was read before its turn.
_FEW_BYTES = 4 * 1024
_MANY = 64


class Turns:
    """Two lines before the event loop's iterations: reads that wait to be parsed, and requests that go on."""

    def __init__(self) -> None:
        self._reads: deque[Callable[[], None]] = deque()
        self._requests: deque[asyncio.Future[None]] = deque()
        self.connections = 0  # that are open
        self._began_s: float | None = None  # of what is done for clients in this iteration
        self._was_busy = False  # at the beginning of this iteration
        self._at_once = _MOST_REQUESTS  # requests that an iteration goes on with: fewer when the last ones took long

    def is_over(self) -> bool:
        """Return whether this iteration has done enough for clients: what else was read has to wait."""
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._begin(now_s)
        assert self._began_s is not None
        return bool(self._reads) or now_s - self._began_s > TURN_S

    def is_busy(self) -> bool:
        """Return whether clients wait for each other: iterations are long, and what is done in each has to be more."""
        return self._was_busy or bool(self._reads or self._requests)

    def defer(self, parse: Callable[[], None]) -> None:
        """Call `parse` in a later iteration, in the order of these calls."""
        self._reads.append(parse)
        self._begin()

    async def request(self) -> None:
        """Wait for an iteration that has room for a pipelined request."""
        granted = asyncio.get_running_loop().create_future()
        self._requests.append(granted)
        self._begin()
        await granted

    def _begin(self, now_s: float | None = None) -> None:
        if self._began_s is None:
            loop = asyncio.get_running_loop()
            self._began_s = loop.time() if now_s is None else now_s
            # Runs before what the next iteration reads: callbacks of selected sockets are put behind it.
            loop.call_soon(self._next)

    def _next(self) -> None:
        assert self._began_s is not None
        loop = asyncio.get_running_loop()
        is_long = loop.time() - self._began_s > 2 * TURN_S
        self._at_once = max(1, self._at_once // 2) if is_long else min(_MOST_REQUESTS, self._at_once + 1)
        self._began_s = None
        self._was_busy = bool(self._reads or self._requests)
        if not self._reads and not self._requests:
            return
        self._begin()
        until_s = loop.time() + TURN_S
        granted = 0
        while self._requests and granted < self._at_once:
            waiting = self._requests.popleft()
            if not waiting.done():  # a client that left has cancelled its own
                waiting.set_result(None)
                granted += 1
        while self._reads:
            self._reads.popleft()()
            if loop.time() >= until_s:
                break


class Reads:
    """What one connection has read, parsed at once or in later iterations. It reads no more until that is parsed."""

    def __init__(self, turns: Turns, parse: Callable[[bytes], None]) -> None:
        """`parse` is called with pieces of bounded size."""
        self._turns = turns
        self._parse = parse
        self._waiting: list[bytes] = []
        self._paused = False  # reading, until `_waiting` is parsed
        self._transport: asyncio.Transport | None = None

    def bound(self, transport: asyncio.Transport) -> None:
        """Bound the next reads: of many clients, what they send stays in the kernel."""
        if hasattr(transport, "max_size"):
            transport.max_size = _FEW_BYTES if self._turns.connections > _MANY else ONE_READ_BYTES

    def attach(self, transport: asyncio.Transport) -> None:
        """Decide when the transport reads on: aiohttp asks for it with each part of a body that it passes on."""
        self._transport = transport
        self._resume = transport.resume_reading
        transport.resume_reading = self._resume_reading  # type: ignore[method-assign]

    def detach(self) -> None:
        """Forget what waits, and the transport, which refers to this object."""
        self._waiting = []
        if self._transport is not None:
            del self._transport.resume_reading
            self._transport = None

    def received(self, data: bytes) -> None:
        """Parse what was read, or put it in line."""
        if self._waiting or (len(data) > _AT_ONCE_BYTES and self._turns.is_over()):
            self._defer(data)
        else:
            if len(data) == _FEW_BYTES and self._transport is not None:
                self.bound(self._transport)
            self._parse_pieces(data)

    def _parse_pieces(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            if start and self._turns.is_over():
                self._defer(data[start:])
                return
            self._parse(data[start : start + _PIECE_BYTES])

    def _defer(self, data: bytes) -> None:
        if not self._waiting:
            self._turns.defer(self._parse_waiting)
        self._waiting.append(data)
        transport = self._transport
        if transport is not None and transport.is_reading():
            transport.pause_reading()
            self._paused = True

    def _parse_waiting(self) -> None:
        data, self._waiting = b"".join(self._waiting), []
        transport = self._transport
        if not data or transport is None or transport.is_closing():
            return
        self.bound(transport)
        if self._paused:  # before aiohttp sees the data: it may pause the transport itself
            self._paused = False
            self._resume()
        self._parse_pieces(data)

    def _resume_reading(self) -> None:
        if self._waiting:
            self._paused = True
        else:
            self._resume()
