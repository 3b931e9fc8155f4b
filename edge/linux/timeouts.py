"""Wait with a time limit without losing a cancellation.

Before Python 3.12 asyncio.wait_for swallows a cancellation that arrives together with the result (python/cpython#86296,
fixed by #98518), and the cancelled task runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class DeadlineExceeded(Exception):
    """The time limit passed first."""


async def within(work: Awaitable[T], limit_s: float) -> T:
    """Return the result, or cancel the work and raise Late after `limit_s`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(0.0, limit_s))
        if not task.done():
            raise DeadlineExceeded
        return task.result()
    finally:
        if not task.done():
            task.cancel()


async def happens(event: asyncio.Event, limit_s: float) -> bool:
    """Wait for the event; return False after `limit_s`."""
    if event.is_set():
        return True
    try:
        return await within(event.wait(), limit_s)
    except DeadlineExceeded:
        return False
