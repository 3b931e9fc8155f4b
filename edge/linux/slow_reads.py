"""Notice reads that do not return: the driver behind a file of /proc or /sys may hang, and the disk of any other file.

No signal ends a process that waits in the kernel: the call that reads runs in a thread, which is left behind. Standard
library only: imported before the first child is spawned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
NOTICE_S = 2.0  # a command that is silent for longer looks dead
LOOK_S = 0.25


class _Read(NamedTuple):
    path: str
    since_s: float  # time.monotonic()


_reads: dict[int, _Read] = {}  # the read in progress, by thread


class ReadHangs(Exception):
    """A call that did not end in time. `path` is the file that it reads, None where it waits for something else."""

    def __init__(self, path: str | None, waited_s: float) -> None:
        super().__init__(path, waited_s)
        self.path = path
        self.waited_s = waited_s


class reading:
    """A context in which this thread reads `path`, or asks for its state. Contexts are not nested."""

    __slots__ = ("_path",)

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        _reads[threading.get_ident()] = _Read(str(self._path), time.monotonic())

    def __exit__(self, *_: object) -> None:
        _reads.pop(threading.get_ident(), None)


def slow_read(least_s: float) -> str | None:
    """Return the path that a thread has been reading for `least_s` or longer; None if there is none."""
    now_s = time.monotonic()
    return next((read.path for read in list(_reads.values()) if now_s - read.since_s >= least_s), None)


@contextmanager
def slow_reads_noticed(on_wait: Callable[[str], None]) -> Iterator[None]:
    """Name a file on which this process waits while the context is open.

    `on_wait` gets one sentence, in another thread, once a read has not returned for NOTICE_S.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(NOTICE_S / 2):
            path = slow_read(NOTICE_S)
            if path is not None:
                on_wait(f"waiting for the kernel: a read of {path} has not returned for {NOTICE_S:.0f} s")
                return

    threading.Thread(target=look, name="slow-reads", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def answer_of(function: Callable[[], T], limit_s: float, read_limit_s: float) -> T:
    """Return what a blocking function returns, or raise what it raises; for callers without an event loop.

    Raises ReadHangs after `limit_s`, or once one of its reads has not returned for `read_limit_s`. Both are counted by
    looks: a process that was stopped, or got no CPU, has not waited for a disk meanwhile.
    """
    answer: list[Any] = []
    done = threading.Event()

    def work() -> None:
        try:
            answer[:] = [function(), None]
        except BaseException as error:  # raised again below
            answer[:] = [None, error]
        done.set()

    thread = threading.Thread(target=work, name="slow-call", daemon=True)
    thread.start()
    look_s = min(LOOK_S, limit_s / 4, read_limit_s / 4)
    waited_s = read_s = 0.0
    read: _Read | None = None
    while not done.wait(look_s):
        waited_s += look_s
        before, read = read, _reads.get(thread.ident or 0)
        read_s = read_s + look_s if read is not None and read is before else 0.0
        if read is not None and read_s >= read_limit_s:
            raise ReadHangs(read.path, read_limit_s)
        if waited_s >= limit_s:
            raise ReadHangs(None if read is None else read.path, limit_s)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result
