"""Writes that a disk may hold up: their order, their end, and that no caller waits for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.linux.ordered_writer import OrderedWriter, at_once

PATIENCE_S = 30.0


class HungJob:
    """A job that does not return until `over` is set, as a write to a dead disk."""

    def __init__(self) -> None:
        self.began, self.over = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        self.over.wait()


@pytest.fixture
def hung() -> Iterator[HungJob]:
    job = HungJob()
    yield job
    job.over.set()


def test_jobs_run_in_the_order_of_put_in_one_other_thread() -> None:
    writer, seen, threads = OrderedWriter("w"), [], set()

    def job(number: int) -> None:
        seen.append(number)
        threads.add(threading.get_ident())

    for number in range(100):
        writer.put(lambda number=number: job(number))
    assert writer.close(PATIENCE_S)
    assert seen == list(range(100))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_what_a_job_reads_and_writes_again_loses_nothing(tmp_path: Path) -> None:
    path, writer = tmp_path / "count", OrderedWriter("w")
    path.write_text("0")

    def add() -> None:
        path.write_text(str(int(path.read_text()) + 1))

    putting = [threading.Thread(target=lambda: [writer.put(add) for _ in range(20)]) for _ in range(4)]
    for thread in putting:
        thread.start()
    for thread in putting:
        thread.join()
    assert writer.drain(PATIENCE_S)
    assert path.read_text() == "80"
    assert writer.close(PATIENCE_S)


def test_a_job_that_raises_is_logged_once_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    writer, seen = OrderedWriter("state"), []
    with caplog.at_level(logging.ERROR):
        writer.put(lambda: 1 / 0)
        writer.put(lambda: seen.append("next"))
        assert writer.close(PATIENCE_S)
    assert seen == ["next"]
    (record,) = caplog.records
    assert "state: a job failed" in record.getMessage() and "ZeroDivisionError" in caplog.text


def test_a_hung_job_holds_up_neither_put_nor_drain_nor_close(hung: HungJob) -> None:
    writer, seen = OrderedWriter("w", most_jobs=3), []
    writer.put(hung)
    assert hung.began.wait(PATIENCE_S)
    for number in range(10):
        writer.put(lambda number=number: seen.append(number))
    assert writer.dropped == 7, "those beyond the bound"
    assert not writer.drain(0.01)
    assert not writer.close(0.01)
    assert writer.dropped == 10
    writer.put(lambda: seen.append("after"))
    assert writer.dropped == 11
    hung.over.set()
    assert writer.drain(PATIENCE_S), "the thread comes to its end"
    assert seen == []


def test_a_slow_disk_that_goes_on_answering_is_waited_for() -> None:
    writer, seen = OrderedWriter("w"), []
    pause = threading.Event()  # never set: each job takes a part of the limit, all of them several times the limit
    for number in range(12):
        writer.put(lambda number=number: (pause.wait(0.25), seen.append(number)))
    assert writer.close(1.5)
    assert seen == list(range(12))


def test_the_oldest_jobs_are_dropped_and_the_rest_stays_in_order(hung: HungJob) -> None:
    writer, seen = OrderedWriter("w", most_jobs=3), []
    writer.put(hung)
    assert hung.began.wait(PATIENCE_S)
    for number in range(10):
        writer.put(lambda number=number: seen.append(number))
    hung.over.set()
    assert writer.close(PATIENCE_S)
    assert (seen, writer.dropped) == ([7, 8, 9], 7)


async def test_a_result_comes_back_on_the_event_loop() -> None:
    writer, came, threads = OrderedWriter("w"), asyncio.Event(), []

    def then(result: int) -> None:
        threads.append((result, threading.get_ident()))
        came.set()

    writer.put(lambda: 7, then)
    await asyncio.wait_for(came.wait(), PATIENCE_S)
    assert threads == [(7, threading.get_ident())]
    assert writer.close(PATIENCE_S)


def test_a_result_for_a_loop_that_has_ended_is_dropped(hung: HungJob) -> None:
    writer, seen = OrderedWriter("w"), []

    async def put() -> None:
        writer.put(hung, seen.append)

    asyncio.run(put())
    hung.over.set()
    writer.put(lambda: seen.append("next"))
    assert writer.close(PATIENCE_S)
    assert seen == ["next"]
    with pytest.raises(RuntimeError):
        writer.put(lambda: 1, seen.append)


def test_at_once_runs_in_the_calling_thread() -> None:
    seen: list[int] = []
    at_once(lambda: 5, seen.append)
    at_once(lambda: seen.append(6))
    assert seen == [5, 6]
