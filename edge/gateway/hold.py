"""The waiting room: requests that cannot go ahead yet. Bounded in number, in bytes and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from edge.gateway.body import Body
from edge.gateway.openai import Fault
from edge.gateway.refused import Refused
from edge.status import ModelStatus, State
from edge.units import format_bytes
from edge.upstream import Endpoint, Upstream

DEFAULT_RETRY_S = 5.0
REST_LOOK_S = 0.2
T = TypeVar("T")


class WaitingRoom:
    """Counts who waits and what their bodies weigh. Used from one event loop only."""

    def __init__(self, requests: int, total_bytes: int) -> None:
        self._requests = requests
        self._bytes = total_bytes
        self.seats = 0
        self.held_bytes = 0
        self.waiting: dict[str, int] = {}  # for their model to be ready, by model
        self._closed: asyncio.Future[None] | None = None

    def closed(self) -> asyncio.Future[None]:
        """Done once the gateway stops: nobody waits any longer then."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
        return self._closed

    def close(self) -> None:
        closed = self.closed()
        if not closed.done():
            closed.set_result(None)

    def seat(self, upstream: Upstream, body: Body, kept: Kept, until_s: float) -> Seat:
        """`until_s`: on the loop's clock."""
        return Seat(self, upstream, body, kept, until_s)

    def take(self, upstream: Upstream) -> None:
        """Raises Refused."""
        if self.seats >= self._requests:
            raise Refused(full(upstream, f"{self._requests} requests wait already"))
        self.seats += 1

    def kept(self) -> Kept:
        return Kept(self)

    def keep(self, count: int) -> None:
        """Raises Refused."""
        if self.held_bytes + count > self._bytes:
            limit = format_bytes(self._bytes)
            message = f"the bodies of waiting requests may hold {limit} together, and do"
            raise Refused(Fault(503, "waiting_room_full", message, "try again later", DEFAULT_RETRY_S))
        self.held_bytes += count


class Kept:
    """Bytes of one request's body that are kept in memory; `with` gives them back, after the answer has ended."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room
        self._bytes = 0

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._room.held_bytes -= self._bytes

    def cover(self, body: Body) -> None:
        """All that is kept of the body by now. Raises Refused."""
        self.grow(max(0, body.kept_bytes - self._bytes))

    def grow(self, count: int) -> None:
        """Raises Refused."""
        self._room.keep(count)
        self._bytes += count


class Seat:
    """One waiting request; `with` gives its place back in whatever way it ends. `kept` counts its bytes.

    The body is read meanwhile: a connection that nobody reads from does not show that its client left.
    """

    def __init__(self, room: WaitingRoom, upstream: Upstream, body: Body, kept: Kept, until_s: float) -> None:
        self._room = room
        self._upstream = upstream
        self._body = body
        self._deadline_s = until_s
        self._kept = kept
        self._reading: asyncio.Future[None] | None = None

    def __enter__(self) -> Seat:
        self._room.take(self._upstream)
        try:
            self._kept.cover(self._body)
        except Refused:
            self._room.seats -= 1
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._room.seats -= 1

    async def endpoint(self) -> Endpoint:
        """Waits until the model is READY. Raises Refused; FAILED ends the wait at once."""
        model = self._upstream.model_id
        waiting = self._room.waiting
        waiting[model] = waiting.get(model, 0) + 1
        try:
            while True:
                status = await self._ready()
                endpoint = self._upstream.endpoint()
                if endpoint is not None:
                    return endpoint
                if status.state is State.FAILED:
                    raise Refused(failed(status))
                if status.state is not State.READY:  # at rest, and not failed: nothing wakes whoever waits
                    await self._until(asyncio.sleep(REST_LOOK_S))
        finally:
            waiting[model] -= 1

    async def _ready(self) -> ModelStatus:
        return await self._until(self._upstream.ensure_ready())

    async def _until(self, done: Coroutine[Any, Any, T]) -> T:
        until = asyncio.ensure_future(done)
        try:
            await self.wait(until, lambda: not_yet(self._upstream))
            return until.result()
        finally:
            until.cancel()

    async def wait(self, until: asyncio.Future[Any], late: Callable[[], Fault]) -> None:
        """Until `until` is done. Raises Refused when time is up (`late` says how), the body is bad or we stop.

        Cancelling it (the client left) takes effect at once.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._body.read(grow=self._kept.grow))
        closed = self._room.closed()
        loop = asyncio.get_running_loop()
        while not until.done():
            waits: set[asyncio.Future[Any]] = {until, closed}
            if not self._reading.done():
                waits.add(self._reading)
            left_s = self._deadline_s - loop.time()
            await asyncio.wait(waits, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if self._reading.done():
                self._reading.result()  # too large, too slow: said now, not after the wait
            if closed.done():
                raise Refused(Fault(503, "stopping", "edgellm is stopping", None, DEFAULT_RETRY_S))
            if not until.done() and loop.time() >= self._deadline_s:
                raise Refused(late())

    async def body_read(self) -> None:
        """The rest of the body, where it is still on its way. Raises Refused."""
        if self._reading is not None:
            await self._reading


def failed(status: ModelStatus) -> Fault:
    """The model cannot be served. Evidence stays inside."""
    if status.failure is None:
        return Fault(503, "failed", f"model {status.id!r} cannot be served", "edgellm status says why")
    message = f"model {status.id!r} cannot be served: {status.failure.kind}"
    return Fault(503, status.failure.kind, message, status.failure.hint, evidence=status.failure.evidence)


def not_yet(upstream: Upstream) -> Fault:
    status = upstream.status()
    message = f"model {upstream.model_id!r} is not ready yet ({status.state.value})"
    return Fault(503, "loading", message, "try again later", retry_in_s(upstream))


def full(upstream: Upstream, why: str) -> Fault:
    message = f"no place to wait for model {upstream.model_id!r}: {why}"
    return Fault(503, "waiting_room_full", message, "try again later", retry_in_s(upstream))


def retry_in_s(upstream: Upstream) -> float:
    """From the last start's record where there is one."""
    expected = upstream.expected_ready_in_s()
    return DEFAULT_RETRY_S if expected is None else max(1.0, expected)
