"""Waiting with a limit: late, in time, and cancelled at the moment that the result arrives."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edge.linux.timeouts import DeadlineExceeded, happens, in_thread, within


async def test_in_time_and_late() -> None:
    event = asyncio.Event()
    assert not await happens(event, 0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await happens(event, 10)
    assert await happens(event, 0)
    with pytest.raises(DeadlineExceeded):
        await within(asyncio.sleep(10), 0.001)


async def test_a_cancellation_in_the_same_moment_is_not_lost() -> None:
    """Before Python 3.12 asyncio.wait_for swallows such a cancellation."""
    event, turns = asyncio.Event(), 0

    async def forever() -> None:
        nonlocal turns
        while turns < 100:
            await happens(event, 10)
            event.clear()
            turns += 1

    task = asyncio.create_task(forever())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert turns <= 1


async def test_what_is_given_up_loses_no_item_of_a_queue() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(200):
        asyncio.get_running_loop().call_later(0.001, queue.put_nowait, number)
        try:
            got = await within(queue.get(), 0.001)
        except DeadlineExceeded:
            got = await queue.get()
        assert got == number


async def test_a_blocking_call_is_left_behind_and_the_loop_turns_meanwhile() -> None:
    over = threading.Event()
    with pytest.raises(DeadlineExceeded):
        await in_thread(over.wait, 0.05)
    over.set()
    assert await in_thread(lambda: 7, 10) == 7
    with pytest.raises(OSError, match="gone"):
        await in_thread(fail, 10)


def fail() -> None:
    raise OSError("gone")
