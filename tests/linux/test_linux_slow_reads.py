"""Reads that do not return, with a FIFO in place of a file behind which a driver or a disk hangs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from edge.linux.slow_reads import ReadHangs, answer_of, reading, slow_read, slow_reads_noticed
from edge.linux.tree import Tree


class Hung:
    """A file whose open(2) does not return until `answer`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hung"
        os.mkfifo(self.path)

    def read(self) -> bytes:
        with reading(self.path), self.path.open("rb") as file:
            return file.read()

    def answer(self, text: bytes) -> None:
        self.path.write_bytes(text)


def test_the_read_that_hangs_is_named_and_its_thread_left_behind(tmp_path: Path) -> None:
    hung = Hung(tmp_path)
    with pytest.raises(ReadHangs) as raised:
        answer_of(hung.read, 60.0, 0.1)
    assert (raised.value.path, raised.value.waited_s) == (str(hung.path), 0.1)
    assert slow_read(0.1) == str(hung.path)
    thread = [each for each in threading.enumerate() if each.name == "slow-call"][-1]
    assert thread.daemon, "the exit of the process must not wait for it"
    hung.answer(b"late")
    thread.join(60)
    assert slow_read(0.0) is None


def test_another_wait_has_a_limit_too_and_no_file(tmp_path: Path) -> None:
    over = threading.Event()
    with pytest.raises(ReadHangs) as raised:
        answer_of(over.wait, 0.1, 60.0)
    assert (raised.value.path, raised.value.waited_s) == (None, 0.1)
    over.set()


def test_a_slow_read_that_returns_is_no_hang(tmp_path: Path) -> None:
    hung = Hung(tmp_path)
    said: list[str] = []
    noticed = threading.Event()

    def notice(text: str) -> None:
        said.append(text)
        noticed.set()
        hung.answer(b"late")

    with slow_reads_noticed(notice):
        assert answer_of(hung.read, 60.0, 60.0) == b"late"
    assert noticed.is_set()
    assert said == [f"waiting for the kernel: a read of {hung.path} has not returned for 2 s"]


def test_what_the_call_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        answer_of(lambda: 1 // 0, 60.0, 60.0)
    with pytest.raises(KeyboardInterrupt):
        answer_of(lambda: (_ for _ in ()).throw(KeyboardInterrupt), 60.0, 60.0)


def test_a_read_that_fails_leaves_no_mark(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert (tree.text("/absent"), tree.exists("/absent"), tree.children("/absent")) == (None, False, [])
    assert slow_read(0.0) is None
