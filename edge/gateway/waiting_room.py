"""Hold requests that cannot go ahead yet, bounded in number, in bytes and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sized
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from edge.gateway.body import Body
from edge.gateway.openai import HttpFault, RejectedError
from edge.supervisor.status import ModelStatus, State
from edge.supervisor.upstream import Endpoint, Upstream
from edge.units import KIB, MIB, format_bytes

DEFAULT_RETRY_S = 5.0  # without a record of an earlier start
REST_LOOK_S = 0.2  # a stopped model has no event to wait for
# Bodies that are still on their way to where they are sent or wait: 512 unfinished ones of 240 KB held 125 MiB. What a
# short chat needs is free, so that large uploads that crawl shut no conversation out.
_ARRIVING_BYTES = 8 * MIB
_ARRIVING_FREE_BYTES = 8 * KIB
T = TypeVar("T")


class WaitingQueue:
    """Counts the requests that wait and the bytes of their bodies. Used from one event loop only.

    `models`: those that share the places. One of several gets three quarters at most: the first request for another
    model finds a place while one that loads slowly has a burst.
    """

    def __init__(self, requests: int, total_bytes: int, models: Sized = ()) -> None:
        self._requests = requests
        self._bytes = total_bytes
        self._models = models
        self._places: dict[str, int] = {}  # tickets by model
        self.held_bytes = 0
        self.arriving_bytes = 0  # of bodies whose first part is read, beyond _ARRIVING_FREE_BYTES of each
        self.for_model: dict[str, int] = {}  # requests that wait for their model to be ready, by model
        self._closed: asyncio.Future[None] | None = None

    def closed(self) -> asyncio.Future[None]:
        """Return a future that is done once the gateway stops: every wait ends then."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
        return self._closed

    def close(self) -> None:
        closed = self.closed()
        if not closed.done():
            closed.set_result(None)

    def ticket(self, upstream: Upstream, body: Body, reserved: ByteReservation, until_s: float) -> Ticket:
        """Return a place in the queue, to be entered with `with`. `until_s`: on the loop's clock."""
        return Ticket(self, upstream, body, reserved, until_s)

    @property
    def tickets(self) -> int:
        return sum(self._places.values())

    def take(self, upstream: Upstream) -> str:
        """Count one more request; return the id to give back. Raises RejectedError if no place is left."""
        model = upstream.model_id
        held = self._places.get(model, 0)
        share = max(1, self._requests * 3 // 4) if len(self._models) > 1 else self._requests
        if self.tickets >= self._requests or held >= share:
            count = held if held >= share else self.tickets
            message = f"no place to wait for model {model!r}: {count} requests wait already"
            raise RejectedError(HttpFault(503, "waiting_room_full", message, "try again later", retry_in_s(upstream)))
        self._places[model] = held + 1
        return model

    def give_back(self, model: str) -> None:
        """Count one request less."""
        self._places[model] -= 1
        if not self._places[model]:
            del self._places[model]

    def reserve(self) -> ByteReservation:
        """Return an empty reservation, to be entered with `with`."""
        return ByteReservation(self)

    def add_bytes(self, count: int) -> None:
        """Raises RejectedError if the bodies of all waiting requests would exceed the limit."""
        if self.held_bytes + count > self._bytes:
            limit = format_bytes(self._bytes)
            message = f"the bodies of waiting requests may hold {limit} together, and do"
            raise RejectedError(HttpFault(503, "waiting_room_full", message, "try again later", DEFAULT_RETRY_S))
        self.held_bytes += count


class ByteReservation:
    """Bytes of one request's body that stay in memory; leaving `with` returns them, after the answer has ended."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._bytes = 0
        self._arrived = self._arriving = 0
        self._has_room = False  # another body ended for this one; what that held is free a moment later

    def __enter__(self) -> ByteReservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shrink(self._bytes)
        self.arrived()

    def arrive(self, count: int, make_room: Callable[[], bool]) -> None:
        """Count `count` bytes of a body's first part. Raises RejectedError if too many bodies are on their way.

        `make_room` ends another body that crawls, and returns False if there is none.
        """
        self._arrived += count
        counted = max(0, self._arrived - _ARRIVING_FREE_BYTES) - self._arriving
        self._queue.arriving_bytes += counted
        self._arriving += counted
        others = self._queue.arriving_bytes - self._arriving  # alone it may hold as much as it needs
        if self._has_room or not counted or not others or others + self._arriving <= _ARRIVING_BYTES:
            return
        self._has_room = make_room()
        if not self._has_room:
            message = f"the bodies that are on their way hold {format_bytes(_ARRIVING_BYTES)} together"
            raise RejectedError(HttpFault(503, "waiting_room_full", message, "try again later", DEFAULT_RETRY_S))

    def arrived(self) -> None:
        """Count the body as arriving no longer: it is sent now, or covered as one that waits."""
        self._queue.arriving_bytes -= self._arriving
        self._arriving = 0

    def cover(self, body: Body) -> None:
        """Reserve all that is kept of the body by now. Raises RejectedError."""
        self.grow(max(0, body.kept_bytes - self._bytes))

    def grow(self, count: int) -> None:
        """Reserve `count` more bytes. Raises RejectedError."""
        self._queue.add_bytes(count)
        self._bytes += count

    def grow_answer(self, count: int) -> None:
        """Reserve `count` more bytes of an answer that is kept whole. Raises RejectedError."""
        try:
            self.grow(count)
        except RejectedError:
            message = "answers that are kept whole hold as much as gateway.hold.bytes allows"
            hint = "ask for a stream or for less, or raise gateway.hold.bytes"
            raise RejectedError(HttpFault(503, "answers_too_large", message, hint, DEFAULT_RETRY_S)) from None

    def cover_unpacking(self, body: Body) -> None:
        """Reserve what the decoder may hold until the rest of the body is sent. Raises RejectedError."""
        count = body.unpacking_bytes
        if count:
            self.grow(count)
            body.when_sent = partial(self.shrink, count)

    def shrink(self, count: int) -> None:
        """Return `count` bytes, at most all."""
        count = min(count, self._bytes)
        self._queue.held_bytes -= count
        self._bytes -= count


class Ticket:
    """The place of one waiting request; leaving `with` gives it back however the request ends.

    The body is read meanwhile: the kernel reports that a client left only on a connection that is read from.
    """

    def __init__(
        self, queue: WaitingQueue, upstream: Upstream, body: Body, reserved: ByteReservation, until_s: float
    ) -> None:
        self._queue = queue
        self._upstream = upstream
        self._body = body
        self._reserved = reserved
        self._deadline_s = until_s
        self._reading: asyncio.Future[None] | None = None
        self._model = ""  # that the place is counted for: a placeholder gets its name later

    def __enter__(self) -> Ticket:
        self._model = self._queue.take(self._upstream)
        try:
            self._reserved.cover(self._body)
        except RejectedError:
            self._queue.give_back(self._model)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._queue.give_back(self._model)

    async def endpoint(self, *, first: bool = False) -> Endpoint:
        """Wait until the model is READY. Raises RejectedError; FAILED ends the wait at once.

        `first`: the request may be the engine's first one.
        """
        model = self._upstream.model_id
        waiting = self._queue.for_model
        waiting[model] = waiting.get(model, 0) + 1
        try:
            while True:
                status = await self._until(self._upstream.ensure_ready(first=first))
                endpoint = self._upstream.endpoint(first=first)
                if endpoint is not None:
                    return endpoint
                if status.state is State.FAILED:
                    raise RejectedError(failed_fault(status))
                # Stopped by an operator or for heat: ensure_ready() returns at once, calls without a pause took a core.
                if status.state is not State.READY:
                    await self._until(asyncio.sleep(REST_LOOK_S))
        finally:
            waiting[model] -= 1

    async def _until(self, done: Coroutine[Any, Any, T]) -> T:
        until = asyncio.ensure_future(done)
        try:
            await self.wait(until, lambda: not_ready_fault(self._upstream))
            return until.result()
        finally:
            until.cancel()

    async def wait(self, until: asyncio.Future[Any], late: Callable[[], HttpFault]) -> None:
        """Wait until `until` is done.

        Raises RejectedError with `late()` when time is up, and when the body is bad or the gateway stops. Cancelling
        it (the client left) takes effect at once.
        """
        # Reading also shows that the client left: the kernel reports a FIN to a reader only.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._body.read_ahead(self._reserved.grow))
        closed = self._queue.closed()
        loop = asyncio.get_running_loop()
        while not until.done():
            waits: set[asyncio.Future[Any]] = {until, closed}
            if not self._reading.done():
                waits.add(self._reading)
            left_s = self._deadline_s - loop.time()
            await asyncio.wait(waits, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if self._reading.done():
                self._reading.result()  # raises now, not after the wait, if the body is too large or too slow
            if closed.done():
                raise RejectedError(HttpFault(503, "stopping", "edgellm is stopping", None, DEFAULT_RETRY_S))
            if not until.done() and loop.time() >= self._deadline_s:
                raise RejectedError(late())

    async def body_read(self) -> None:
        """Wait for the rest of the body. Raises RejectedError."""
        if self._reading is not None:
            await self._reading


def failed_fault(status: ModelStatus, code: int = 503) -> HttpFault:
    """Return the answer for a model that is FAILED; its evidence goes to admin keys only."""
    if status.failure is None:
        return HttpFault(code, "failed", f"model {status.id!r} cannot be served", "edgellm status shows the reason")
    message = f"model {status.id!r} cannot be served: {status.failure.kind}"
    return HttpFault(code, status.failure.kind, message, status.failure.hint, evidence=status.failure.evidence)


def not_ready_fault(upstream: Upstream) -> HttpFault:
    message = f"model {upstream.model_id!r} is not ready yet ({upstream.status().state.value})"
    return HttpFault(503, "loading", message, "try again later", retry_in_s(upstream))


def retry_in_s(upstream: Upstream) -> float:
    """Return the seconds until the model is expected to be ready, from the record of its last start."""
    expected = upstream.expected_ready_in_s()
    # At least a second: a start that takes longer than the last one would be asked in a tight loop.
    return DEFAULT_RETRY_S if expected is None else max(1.0, expected)
