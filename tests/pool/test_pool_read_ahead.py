"""The model that is likely to start next is in the page cache by then, and nothing else pays for it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from edge.linux.procfs import resident_ratio
from edge.pool.read_ahead import SOON_S, ReadAhead, Sleeper, likely_next
from tests.serving import eventually

SIZE = 32 << 20


def asleep(name: str, slept_s: float | None = None, warm_in_s: float | None = None) -> Sleeper:
    return Sleeper(name, (f"/{name}.gguf",), SIZE, slept_s, warm_in_s)


def look(ahead: ReadAhead, models: list[Sleeper], spare: int, least: int) -> None:
    asyncio.run(ahead.look(models, spare, least))


@pytest.mark.parametrize(
    ("models", "next_"),
    [
        ([], None),
        ([asleep("never")], None),
        ([asleep("old", 90.0), asleep("last", 5.0)], "last"),
        ([asleep("last", 5.0), asleep("due", None, SOON_S)], "due"),
        ([asleep("due", None, 60.0), asleep("sooner", 1000.0, 30.0)], "sooner"),
        ([asleep("last", 5.0), asleep("tomorrow", None, SOON_S + 1)], "last"),
        ([Sleeper("voice", (), 0, 1.0), asleep("last", 5.0)], "last"),
    ],
)
def test_what_is_due_comes_before_what_slept_last(models: list[Sleeper], next_: str | None) -> None:
    found = likely_next(models)
    assert (found.id if found else None) == next_


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file that the page cache does not hold."""
    path = tmp_path / "m.gguf"
    path.write_bytes(os.urandom(1 << 20) * (SIZE >> 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_ratio(path) != 0.0:
        pytest.skip("this file system keeps every page")
    return path


def test_a_model_is_read_into_the_page_cache(cold: Path) -> None:
    ahead = ReadAhead()
    look(ahead, [Sleeper("m", (str(cold),), SIZE, 1.0)], SIZE, 0)
    eventually(lambda: (resident_ratio(cold) or 0.0) > 0.95, "the file is in the page cache")
    eventually(lambda: not ahead.running, "the reader ends by itself")
    assert ahead.model_id == "m"
    ahead.model_id = None
    look(ahead, [Sleeper("m", (str(cold),), SIZE, 1.0)], SIZE, 0)
    assert ahead.model_id is None  # it is there
    ahead.end()


@pytest.mark.parametrize(("spare", "least"), [(SIZE - 1, 0), (SIZE, 1 << 60)])
def test_never_past_the_memory_that_is_spare(cold: Path, spare: int, least: int) -> None:
    ahead = ReadAhead()
    look(ahead, [Sleeper("m", (str(cold),), SIZE, 1.0)], spare, least)
    eventually(lambda: not ahead.running, "no reader")
    assert resident_ratio(cold) == 0.0
    ahead.end()


def test_a_start_ends_the_reader(cold: Path) -> None:
    ahead = ReadAhead()
    look(ahead, [Sleeper("m", (str(cold),) * 1000, SIZE, 1.0)], SIZE, 0)
    assert ahead.running
    ahead.end()
    assert not ahead.running


def test_a_disk_that_hangs_holds_no_event_loop_and_a_start_meanwhile_is_not_read_beside(tmp_path: Path) -> None:
    disk = tmp_path / "m.gguf"
    os.mkfifo(disk)  # open(2) blocks until there is a writer, as on a disk that does not answer

    async def start_while_it_looks(ahead: ReadAhead) -> None:
        looking = asyncio.create_task(ahead.look([Sleeper("m", (str(disk),), SIZE, 1.0)], SIZE, 0))
        await asyncio.sleep(0)
        ahead.end()  # a model starts
        assert not looking.done()
        await asyncio.to_thread(disk.write_bytes, b"")  # the disk answers
        await looking

    ahead = ReadAhead()
    asyncio.run(start_while_it_looks(ahead))
    assert ahead.model_id is None and not ahead.running
