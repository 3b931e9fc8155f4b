"""The waiting room: requests that came before their model is ready. Bounded in number, in bytes and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from edge.gateway.openai import Fault
from edge.status import ModelStatus, State
from edge.upstream import Endpoint, Upstream

DEFAULT_RETRY_S = 5.0


class Refused(Exception):
    """A request ends here with an answer of ours."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class WaitingRoom:
    """Counts who waits and what their bodies weigh. Used from one event loop only."""

    def __init__(self, requests: int, total_bytes: int) -> None:
        self._requests = requests
        self._bytes = total_bytes
        self.waiting: dict[str, int] = {}
        self.held_bytes = 0
        self._closed: asyncio.Future[None] | None = None

    @property
    def count(self) -> int:
        return sum(self.waiting.values())

    def seat(self, upstream: Upstream) -> Seat:
        return Seat(self, upstream)

    def closed(self) -> asyncio.Future[None]:
        """Done once the gateway stops: nobody waits any longer then."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
        return self._closed

    def close(self) -> None:
        closed = self.closed()
        if not closed.done():
            closed.set_result(None)

    def _enter(self, upstream: Upstream) -> None:
        if self.count >= self._requests:
            raise Refused(full(upstream, f"{self._requests} requests wait already"))
        self.waiting[upstream.model_id] = self.waiting.get(upstream.model_id, 0) + 1

    def _leave(self, model: str, held_bytes: int) -> None:
        self.held_bytes -= held_bytes
        self.waiting[model] -= 1

    def _grow(self, upstream: Upstream, count: int) -> None:
        if self.held_bytes + count > self._bytes:
            raise Refused(full(upstream, f"the waiting requests hold {self._bytes} bytes already"))
        self.held_bytes += count


class Seat:
    """One waiting request. Leaving it, in whatever way, gives its place and its bytes back."""

    def __init__(self, room: WaitingRoom, upstream: Upstream) -> None:
        self._room = room
        self._upstream = upstream
        self._held = 0

    def __enter__(self) -> Seat:
        self._room._enter(self._upstream)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._room._leave(self._upstream.model_id, self._held)

    def grow(self, count: int) -> None:
        """`count` more bytes of the body are kept. Raises Refused."""
        self._room._grow(self._upstream, count)
        self._held += count

    async def until_ready(self, seconds: float, read_body: Callable[[], Awaitable[None]]) -> Endpoint:
        """Waits for READY while the body is read, so that a client who leaves is seen. Raises Refused.

        Cancelling (the client left) ends both waits at once.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        body = asyncio.ensure_future(read_body())
        try:
            endpoint = await self._ready(deadline, body)
            await body
            return endpoint
        finally:
            body.cancel()

    async def _ready(self, deadline: float, body: asyncio.Future[None]) -> Endpoint:
        loop = asyncio.get_running_loop()
        while True:
            ready = asyncio.ensure_future(self._upstream.ensure_ready())
            waits: set[asyncio.Future[object]] = {ready, self._room.closed()}  # type: ignore[arg-type]
            if not body.done():
                waits.add(body)  # type: ignore[arg-type]
            try:
                await asyncio.wait(waits, timeout=max(0.0, deadline - loop.time()), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ready.cancel()
            if body.done():
                body.result()  # too large, too slow, not a body: say so now
            if self._room.closed().done():
                raise Refused(Fault(503, "stopping", "edgellm is stopping", retry_after_s=DEFAULT_RETRY_S))
            if ready.done() and not ready.cancelled():
                endpoint = self._upstream.endpoint()
                status = ready.result()
                if endpoint is not None:
                    return endpoint
                if status.state is State.FAILED:
                    raise Refused(failed(status))
            if loop.time() >= deadline:
                raise Refused(not_yet(self._upstream))


def failed(status: ModelStatus) -> Fault:
    """The model cannot be served. Evidence stays inside."""
    if status.failure is None:
        return Fault(503, "failed", f"model {status.id!r} cannot be served", "edgellm status says why")
    message = f"model {status.id!r} cannot be served: {status.failure.kind}"
    return Fault(503, status.failure.kind, message, status.failure.hint)


def not_yet(upstream: Upstream) -> Fault:
    status = upstream.status()
    message = f"model {upstream.model_id!r} is not ready yet ({status.state.value})"
    return Fault(503, "loading", message, "try again later", retry_in_s(upstream))


def full(upstream: Upstream, why: str) -> Fault:
    message = f"model {upstream.model_id!r} is not ready and {why}"
    return Fault(503, "waiting_room_full", message, "try again later", retry_in_s(upstream))


def retry_in_s(upstream: Upstream) -> float:
    """From the last start's record where there is one."""
    expected = upstream.expected_ready_in_s()
    return DEFAULT_RETRY_S if expected is None else max(1.0, expected)
