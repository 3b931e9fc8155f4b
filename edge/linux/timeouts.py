"""Wait with a time limit without losing a cancellation.

Before Python 3.12 asyncio.wait_for swallows a cancellation that arrives together with the result (python/cpython#86296,
fixed by #98518), and the cancelled task runs on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class DeadlineExceeded(Exception):
    """The time limit passed first."""


async def within(work: Awaitable[T], limit_s: float | None) -> T:
    """Return the result, or cancel the work and raise DeadlineExceeded after `limit_s`; None: there is no limit."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=None if limit_s is None else max(0.0, limit_s))
        if not task.done():
            raise DeadlineExceeded
        return task.result()
    finally:
        if not task.done():
            task.cancel()


async def in_thread(function: Callable[[], T], limit_s: float | None) -> T:
    """Return what a blocking function returns. Raises DeadlineExceeded after `limit_s`, and what the function raises.

    A call into a driver, or a read of a dead disk, may never return: its thread is a daemon, so that the exit does not
    wait for it, as it does for threads of asyncio.to_thread. None is for a caller that is cancelled at the exit.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, fault = None, None
        try:
            result = function()
        except Exception as error:
            fault = error
        with suppress(RuntimeError):  # the loop closed meanwhile
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=work, name="blocking-call", daemon=True).start()
    return await within(answer, limit_s)


async def happens(event: asyncio.Event, limit_s: float) -> bool:
    """Wait for the event; return False after `limit_s`."""
    if event.is_set():
        return True
    try:
        return await within(event.wait(), limit_s)
    except DeadlineExceeded:
        return False
