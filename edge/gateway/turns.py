"""Bound what one iteration of the event loop does for clients that send without a pause, so that probes get between.

asyncio serves every socket that is readable in one iteration: 512 clients that send bodies in chunks of one byte took
0.9 s of each, and aiohttp answers the requests that a client has pipelined (RFC 9112 9.3.2) without returning to the
loop, 32 of each client: `/livez` waited for more than 30 s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_S = 0.02  # an answer of `/livez` takes about four iterations
_MOST_REQUESTS = 16  # a pipelined one takes up to 0.5 ms, a part of a body in 4,096 chunks 10 ms


class Turns:
    """Two lines before the event loop's iterations: reads that wait to be parsed, and requests that go on."""

    def __init__(self) -> None:
        self._reads: deque[Callable[[], None]] = deque()
        self._requests: deque[asyncio.Future[None]] = deque()
        self._began_s: float | None = None  # of what is done for clients in this iteration
        self._at_once = _MOST_REQUESTS  # requests that an iteration goes on with: fewer when the last ones took long

    def is_over(self) -> bool:
        """Return whether this iteration has done enough for clients: what else was read has to wait."""
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._begin(now_s)
        assert self._began_s is not None
        return bool(self._reads) or now_s - self._began_s > TURN_S

    def defer(self, parse: Callable[[], None]) -> None:
        """Call `parse` in a later iteration, in the order of these calls."""
        self._reads.append(parse)
        self._begin()

    async def request(self) -> None:
        """Wait for an iteration that has room for a pipelined request, or for the next part of a body."""
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
