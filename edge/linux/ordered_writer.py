"""Write small files in a thread of their own, so that an event loop never waits for a disk that does not answer."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
# A crash of an engine puts about five jobs: those of some minutes of a crash loop, a few MB with their records.
MOST_JOBS = 128


class Put(Protocol):
    """A way to run a job that may block; `then` gets its result."""

    def __call__(self, job: Callable[[], T], then: Callable[[T], None] | None = None) -> None: ...


def at_once(job: Callable[[], T], then: Callable[[T], None] | None = None) -> None:
    """Run a job in the calling thread: where no event loop waits."""
    result = job()
    if then is not None:
        then(result)


class _Waiting(NamedTuple):
    number: int  # from 1, in the order of `put`
    work: Callable[[], object]


class OrderedWriter:
    """A thread that runs jobs one after the other, in the order of `put`. It never keeps the process alive.

    A write(2) or open(2) on a dead disk (NFS, eMMC) sleeps in the kernel, where no signal ends it. Beyond `most_jobs`
    the oldest waiting job is dropped: a later one of the same file supersedes it. What a job reads and writes again has
    to be in that one job.
    """

    def __init__(self, name: str, most_jobs: int = MOST_JOBS) -> None:
        self.dropped = 0  # jobs that were not run
        self._name = name
        self._most_jobs = most_jobs
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()  # held for moments only, never during a job
        self._number = 0  # of the last job
        self._running: int | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], T], then: Callable[[T], None] | None = None) -> None:
        """Queue a job. Never blocks.

        `then` is called with its result on the event loop of the caller, unless that has ended or the job raised.
        Raises RuntimeError for `then` without a running event loop. After `close` the job is dropped.
        """
        work: Callable[[], object] = job if then is None else _reporting(job, then)
        with self._changed:
            if self._closed:
                self.dropped += 1
                return
            if len(self._waiting) >= self._most_jobs:
                self._waiting.popleft()
                self.dropped += 1
            self._number += 1
            self._waiting.append(_Waiting(self._number, work))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends
                    self._waiting.pop()
                    raise
                self._thread = thread
            self._changed.notify_all()

    def drain(self, limit_s: float, total_s: float = math.inf) -> bool:
        """Wait for the jobs that were put so far; return whether none of them is left. Blocking.

        Gives up once none has ended for `limit_s`: a slow flash card answers, one write after the other; and after
        `total_s`.
        """
        end_s = time.monotonic() + total_s
        with self._changed:
            last = self._number
            while (first := self._first()) <= last:
                if not self._moves_on(first, max(0.0, min(limit_s, end_s - time.monotonic()))):
                    return False
            return True

    def _moves_on(self, first: int, limit_s: float) -> bool:
        return self._changed.wait_for(lambda: self._first() != first, limit_s)

    def close(self, limit_s: float) -> bool:
        """Drain and end the thread; jobs that still wait after `drain` are dropped. Return whether all were run."""
        done = self.drain(limit_s)
        with self._changed:
            self._closed = True
            self.dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return done

    def _first(self) -> int:
        """Return the number of the oldest job that is not done, or one that no job has yet."""
        if self._running is not None:
            return self._running
        return self._waiting[0].number if self._waiting else self._number + 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._running, work = self._waiting.popleft()
            try:
                work()
            except Exception:
                import logging  # late: this module is imported before the first child

                logging.getLogger(__name__).exception("%s: a job failed", self._name)
            with self._changed:
                self._running = None
                self._changed.notify_all()


def _reporting(job: Callable[[], T], then: Callable[[T], None]) -> Callable[[], None]:
    """Return a job that passes its result to `then` on this thread's event loop."""
    import asyncio

    loop = asyncio.get_running_loop()

    def work() -> None:
        result: Any = job()
        try:
            loop.call_soon_threadsafe(then, result)
        except RuntimeError:  # the loop closed meanwhile
            return

    return work
