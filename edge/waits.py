"""Waiting with a limit that loses no cancellation: before Python 3.12 asyncio.wait_for swallows one that comes in the
same moment as what it waits for, and the task that was cancelled goes on for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Late(Exception):
    """The time was over first."""


async def within(work: Awaitable[T], limit_s: float) -> T:
    """The result; raises Late. What is late, and what is cancelled, is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(0.0, limit_s))
        if not task.done():
            raise Late
        return task.result()
    finally:
        if not task.done():
            task.cancel()


async def happens(event: asyncio.Event, limit_s: float) -> bool:
    """Whether it is set in time."""
    if event.is_set():
        return True
    try:
        return await within(event.wait(), limit_s)
    except Late:
        return False
