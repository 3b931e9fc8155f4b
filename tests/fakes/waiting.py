"""Waiting for a condition instead of a time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest


async def until(true: Callable[[], object], within_s: float = 30.0) -> None:
    """Fails the test if it does not come true; generous, because the machine may be busy."""
    for _ in range(int(within_s / 0.01)):
        if true():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"waited {within_s:.0f} s in vain")


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
