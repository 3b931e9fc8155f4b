"""Admission: as many requests at the engine as it has slots, a few in line behind them, 429 for the rest."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from edge.gateway.openai import Fault
from edge.gateway.refused import Refused
from edge.upstream import Upstream

# What one request takes until measured: a guess for Retry-After only.
_FIRST_GUESS_S = 5.0
_SMOOTHING = 0.2
_COOLING_S = 30.0

Wait = Callable[["asyncio.Future[None]", Callable[[], Fault]], Awaitable[None]]


@dataclass(slots=True)
class _Line:
    """One model's queue. `fraction` of its slots may be busy; with `held` nobody goes ahead."""

    upstream: Upstream | None = None  # asked for its slots each time: a restarted engine may have fewer
    active: int = 0
    fraction: float = 1.0
    held: bool = False
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    typical_s: float = _FIRST_GUESS_S

    @property
    def limit(self) -> int:
        slots = 1 if self.upstream is None else self.upstream.slots
        return max(1, int(slots * self.fraction))

    @property
    def full(self) -> bool:
        return self.held or self.active >= self.limit

    def advance(self) -> None:
        while self.waiters and not self.full:
            waiter = self.waiters.popleft()
            if not waiter.done():
                self.active += 1  # on the waiter's behalf: nobody slips in before it runs
                waiter.set_result(None)

    def release(self) -> None:
        self.active -= 1
        self.advance()


class Admission:
    """First come, first served, per model. Used from one event loop only."""

    def __init__(self, queue_requests: int) -> None:
        self._queue_requests = queue_requests
        self._lines: dict[str, _Line] = {}
        self._fraction = 1.0
        self._held = False

    def active(self, model: str) -> int:
        return self._line(model).active

    def queued(self, model: str) -> int:
        return len(self._line(model).waiters)

    def crowded(self, upstream: Upstream) -> bool:
        """Would a request have to stand in line?"""
        line = self._current(upstream)
        return bool(line.waiters) or line.full

    def govern(self, fraction: float, hold_new: bool = False) -> None:
        """The thermal governor's word: this part of each model's slots, though at least one; `hold_new`: all wait."""
        self._fraction, self._held = fraction, hold_new
        for line in self._lines.values():
            line.fraction, line.held = fraction, hold_new
            line.advance()

    def enter_now(self, upstream: Upstream) -> Turn | None:
        """A turn at once, or None when there is a line."""
        if self.crowded(upstream):
            return None
        line = self._line(upstream.model_id)
        line.active += 1
        return Turn(line)

    async def enter(self, upstream: Upstream, wait: Wait, *, patient: bool) -> Turn:
        """A turn, after `wait` where there is a line. Raises Refused: 429 when the line is full.

        A `patient` request waited for its model before this: it is never turned away.
        """
        turn = self.enter_now(upstream)
        if turn is not None:
            return turn
        line = self._current(upstream)
        if not patient and not line.held and len(line.waiters) >= self._queue_requests:
            raise Refused(_busy(upstream, line))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiters.append(waiter)
        try:
            await wait(waiter, lambda: _busy(upstream, line))
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                line.release()  # its turn came in the same moment
            elif waiter in line.waiters:
                line.waiters.remove(waiter)
            raise
        return Turn(line)

    def _line(self, model: str) -> _Line:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _Line(fraction=self._fraction, held=self._held)
        return line

    def _current(self, upstream: Upstream) -> _Line:
        line = self._line(upstream.model_id)
        line.upstream = upstream
        line.advance()
        return line


class Turn:
    """A place at the engine. leave() exactly once."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._since = asyncio.get_running_loop().time()

    def leave(self) -> None:
        took_s = asyncio.get_running_loop().time() - self._since
        self._line.typical_s += _SMOOTHING * (took_s - self._line.typical_s)
        self._line.release()


def _busy(upstream: Upstream, line: _Line) -> Fault:
    if line.held:
        return Fault(503, "too_hot", "the board is too hot for new requests", "try again later", _COOLING_S)
    message = f"model {upstream.model_id!r} works on {line.active} requests and {len(line.waiters)} are in line"
    wait_s = line.typical_s * (len(line.waiters) + 1) / line.limit
    return Fault(429, "busy", message, "try again later, or plan more slots (n_parallel)", wait_s)
