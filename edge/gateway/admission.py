"""Admit as many requests to an engine as it has slots, queue some behind them, reject the rest with 429."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType

from msgspec import Struct, field

from edge.gateway.openai import HttpFault, RejectedError
from edge.supervisor.upstream import Upstream

# Duration of a request until one was measured; used for Retry-After only.
_FIRST_GUESS_S = 5.0
# Requests at an engine that take no slot: each is a connection, and llama-server has few HTTP threads for them.
LIGHT_REQUESTS = 64
_SMOOTHING = 0.2  # weight of the newest duration: about the last ten requests count
_COOLING_S = 30.0  # Retry-After at the thermal limit: an estimate, a heat sink cools within tens of seconds

Wait = Callable[["asyncio.Future[None]", Callable[[], HttpFault]], Awaitable[None]]


class _ModelQueue(Struct):
    """One model's queue. `fraction` of its slots may be busy; with `held` no request goes ahead.

    `spare` returns whether another request may run beside those of all models; `freed` is called when one has ended.
    """

    upstream: Upstream | None = None  # asked for its slots each time: a restarted engine may have fewer
    fixed: int | None = None  # the limit of requests that take no slot
    active: int = 0
    fraction: float = 1.0
    held: bool = False
    cause: str = ""  # of a limit: heat or power
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    typical_s: float = _FIRST_GUESS_S
    spare: Callable[[], bool] = lambda: True
    freed: Callable[[], None] | None = None

    @property
    def limit(self) -> int:
        if self.fixed is not None:
            return self.fixed
        slots = 1 if self.upstream is None else self.upstream.slots
        return max(1, int(slots * self.fraction))

    @property
    def full(self) -> bool:
        return self.held or self.active >= self.limit or not self.spare()

    @property
    def limited(self) -> bool:
        """Whether heat or power keeps a request back, not the number of its own model's requests."""
        return self.held or (self.active < self.limit and not self.spare())

    def advance(self) -> None:
        while self.waiters and not self.full:
            waiter = self.waiters.popleft()
            if not waiter.done():
                self.active += 1  # counted for the waiter now: no other request takes the slot before it runs
                waiter.set_result(None)

    def release(self) -> None:
        self.active -= 1
        self.move()

    def move(self) -> None:
        """Let waiting requests go ahead: those of all models while the governor's limit is shared among them."""
        if self.freed is None or self.fraction >= 1:
            self.advance()
        else:
            self.freed()


class Admission:
    """First in, first out queues, one for each model. Used from one event loop only.

    `rank` orders models while the governor's limit is shared among them: the least goes first.
    """

    def __init__(self, queue_requests: int, upstreams: Mapping[str, Upstream] | None = None) -> None:
        """`upstreams`: all models, whose slots the governor's limit is a fraction of; None: those that were asked."""
        self.rank: Callable[[str], tuple[int, bool]] = lambda model: (0, False)
        self._queue_requests = queue_requests
        self._upstreams = upstreams
        self._queues: dict[str, _ModelQueue] = {}
        self._light: dict[str, _ModelQueue] = {}
        self._fraction = 1.0
        self._held = False
        self._cause = ""

    def active(self, model: str) -> int:
        return self._queue(model).active

    def queued(self, model: str) -> int:
        return len(self._queue(model).waiters)

    def govern(self, fraction: float, hold_new: bool = False, cause: str = "heat") -> None:
        """Apply the governor's limit: `fraction` of all slots and of each model's; with `hold_new` all wait.

        At least one request runs. Requests that run already are left alone.
        """
        self._fraction, self._held, self._cause = fraction, hold_new, cause
        for queue in self._queues.values():
            queue.fraction, queue.held, queue.cause = fraction, hold_new, cause
        self._advance()

    def _spare(self) -> bool:
        """Return whether the governor's limit admits another request, of whichever model."""
        if self._fraction >= 1:
            return True
        asked = (queue.upstream for queue in self._queues.values())
        models: Iterable[Upstream | None] = asked if self._upstreams is None else self._upstreams.values()
        slots = sum(each.slots for each in models if each is not None)
        return sum(queue.active for queue in self._queues.values()) < max(1, int(slots * self._fraction))

    def _advance(self) -> None:
        """Let waiting requests go ahead, those of the models that rank first before others."""
        for model in sorted(filter(self.queued, self._queues), key=self.rank):
            self._queues[model].advance()

    def enter_now(self, upstream: Upstream, *, slot: bool = True) -> SlotLease | None:
        """Return a lease, None where the request would have to wait. `slot`: the request runs inference."""
        queue = self._current(upstream, slot)
        if queue.waiters or queue.full:
            return None
        queue.active += 1
        return SlotLease(queue)

    async def enter(self, upstream: Upstream, wait: Wait, *, patient: bool, slot: bool = True) -> SlotLease:
        """Return a lease, after `wait` where there is a queue. Raises RejectedError with 429 if the queue is full.

        A `patient` request has waited for its model before: it is never rejected.
        """
        lease = self.enter_now(upstream, slot=slot)
        if lease is not None:
            return lease
        queue = self._current(upstream, slot)
        # At the thermal limit requests wait in place of a 429: the limit passes, a full queue is the client's matter.
        if not patient and not queue.limited and len(queue.waiters) >= self._queue_requests:
            raise RejectedError(_busy_fault(upstream, queue))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiters.append(waiter)
        try:
            await wait(waiter, lambda: _busy_fault(upstream, queue))
        # A cancelled request (its client left) must give back a slot that it was given in the same turn.
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                queue.release()  # its slot came in the same turn of the loop
            elif waiter in queue.waiters:
                queue.waiters.remove(waiter)
            raise
        return SlotLease(queue)

    def _queue(self, model: str) -> _ModelQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _ModelQueue(fraction=self._fraction, held=self._held, cause=self._cause)
            queue.spare, queue.freed = self._spare, self._advance
        return queue

    def _current(self, upstream: Upstream, slot: bool = True) -> _ModelQueue:
        if slot:
            queue = self._queue(upstream.model_id)
        else:
            queue = self._light.setdefault(upstream.model_id, _ModelQueue(fixed=LIGHT_REQUESTS))
        queue.upstream = upstream
        queue.move()
        return queue


class SlotLease:
    """One of an engine's slots, held by a request until the end of `with`, or until leave() is called, exactly once."""

    def __init__(self, queue: _ModelQueue) -> None:
        self._queue = queue
        self._since_s = asyncio.get_running_loop().time()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()

    def leave(self) -> None:
        took_s = asyncio.get_running_loop().time() - self._since_s
        self._queue.typical_s += _SMOOTHING * (took_s - self._queue.typical_s)
        self._queue.release()


def _busy_fault(upstream: Upstream, queue: _ModelQueue) -> HttpFault:
    if queue.limited and queue.cause == "power":
        return HttpFault(503, "power_limit", "the board pauses to hold its power limit", "try again later", _COOLING_S)
    if queue.limited:
        return HttpFault(503, "too_hot", "the board is too hot for new requests", "try again later", _COOLING_S)
    message = f"model {upstream.model_id!r} works on {queue.active} requests and {len(queue.waiters)} are queued"
    wait_s = queue.typical_s * (len(queue.waiters) + 1) / queue.limit
    return HttpFault(429, "busy", message, "try again later, or plan more slots (n_parallel)", wait_s)
