"""The pool itself may fail; requests must not wait for it without end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edge.board.memory import MemorySnapshot
from edge.pool.pool import Pool
from edge.pool.warm_at import PoolModel, warm_from
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.supervisor import Supervisor
from tests.supervisor.rig import PATTERNS, model_plan


def sleeping(short_dir: Path) -> ModelHandle:
    supervisor = Supervisor(model_plan(("x",), 1, None, 0), short_dir / "m.sock", PATTERNS, asleep=True)
    return ModelHandle("chat", supervisor=supervisor)


async def admitted(pool: Pool, handle: ModelHandle) -> object:
    running = asyncio.create_task(pool.run())
    try:
        return await asyncio.wait_for(pool.admit(handle), 10)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_memory_that_cannot_be_read_is_not_held_against_a_model(short_dir: Path) -> None:
    def broken() -> MemorySnapshot:
        raise PermissionError("/proc/meminfo")

    handle = sleeping(short_dir)
    assert await admitted(Pool({"chat": handle}, broken, lambda _: PoolModel()), handle) is None


async def test_a_bug_admits_and_is_logged(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bug(_: str) -> PoolModel:
        raise KeyError("chat")

    handle = sleeping(short_dir)
    assert await admitted(Pool({"chat": handle}, lambda: MemorySnapshot({}, {}), bug), handle) is None
    assert "could not decide" in caplog.text


async def test_a_cancelled_request_leaves_the_queue(short_dir: Path) -> None:
    handle = sleeping(short_dir)
    pool = Pool({"chat": handle}, lambda: MemorySnapshot({}, {}), lambda _: PoolModel())
    waiting = asyncio.create_task(pool.admit(handle))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert pool._waiters == []


@pytest.mark.parametrize(
    ("now", "begin"),
    [
        ("2026-11-30T06:00:00", "2026-11-30T07:58:43"),
        ("2026-11-30T08:00:00", "2026-12-01T07:58:43"),
        ("2026-11-30T23:59:00", "2026-12-01T07:58:43"),
    ],
)
def test_warm_at_begins_early_enough(now: str, begin: str) -> None:
    from datetime import datetime

    assert warm_from(datetime.fromisoformat(now), PoolModel(warm_at="08:00", load_s=60.0)) == datetime.fromisoformat(
        begin
    )
    assert warm_from(datetime.fromisoformat(now), PoolModel()) is None
