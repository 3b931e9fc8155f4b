"""Write text where the receiver may block (a full disk, a dead terminal) without holding up the event loop."""

from __future__ import annotations

import atexit
import errno
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TextIO

from edge.linux.ordered_writer import OrderedWriter
from edge.paths import prepared_by_another

# POSIX: a pipe that poll() reports as writable takes PIPE_BUF bytes (4096 on Linux) without blocking.
PIPE_BUF_BYTES = select.PIPE_BUF
# Lines that wait for the disk: some seconds of a flood. An SD card that writes back blocks for as long.
WAITING_BYTES = 1 << 20
WAITING_LINES = 4096
CLOSE_S = 1.0
CLOSE_TOTAL_S = 5.0  # of lines to a serial console, each of which ends in time
DISK_S = 0.5  # the wait for a file or terminal: lines keep their order to those of others, and /livez its second
PAUSE_S = 0.05  # between two writes: what comes meanwhile is one write


class BestEffortWriter:
    """Writes text to a stream that may be full, closed, gone or not read: then the text is dropped.

    A server must not end, and its event loop must not wait, for a terminal or a disk. The descriptor is written without
    the stream's buffer: one that cannot be flushed would turn the exit code into 120.

    A file is always writable to select(2), and a terminal is with room for one byte: a thread writes to them. Once a
    write takes DISK_S, none is waited for until the thread has caught up.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        self._descriptor: int | None = None
        self._slow: OrderedWriter | None = None
        self._cut = False  # the last text was not written to its end
        with suppress(OSError, ValueError):  # io.UnsupportedOperation is both
            self._descriptor = stream.fileno()
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode) or os.isatty(self._descriptor):
                self._slow = _output_thread()

    def write(self, text: str) -> None:
        if self._descriptor is None:
            self._stream.write(text)
            return
        data = text.encode(self._encoding, "replace")
        if self._slow is None:
            self._put_out(self._descriptor, data)
            return
        caught_up = self._slow.drain(0)  # with the lines of all streams: drain() would wait DISK_S for each of them
        try:
            self._slow.put(partial(self._put_out, self._descriptor, data))
        except RuntimeError:  # the interpreter ends: no thread starts any more
            self._put_out(self._descriptor, data)
            return
        if caught_up:
            self._slow.drain(DISK_S)

    def _put_out(self, descriptor: int, data: bytes) -> None:
        """Write what the receiver takes. A text behind one that was cut begins a line: the next JSON event is whole."""
        whole = b"\n" + data if self._cut else data
        rest = memoryview(whole)
        with suppress(OSError):
            while rest and select.select([], [descriptor], [], 0)[1]:
                rest = rest[os.write(descriptor, rest[:PIPE_BUF_BYTES]) :]
        if len(rest) < len(whole):
            self._cut = bool(rest)

    def flush(self) -> None:
        """Do nothing: nothing is buffered. logging.StreamHandler calls it."""

    def isatty(self) -> bool:
        return self._stream.isatty()


@cache
def _output_thread() -> OrderedWriter:
    """Return the thread that writes stdout and stderr where they are files or terminals."""
    writer = OrderedWriter("output", WAITING_LINES)
    atexit.register(writer.drain, CLOSE_S, CLOSE_TOTAL_S)
    return writer


def _refuse_anothers(descriptor: int, path: Path) -> None:
    """Raise OSError for a file that another user made first in /tmp: it would read what is written."""
    theirs = os.fstat(descriptor).st_uid not in (0, os.geteuid()) and path.parent.stat().st_mode & stat.S_IWOTH
    if theirs or prepared_by_another(path.parent, os.environ) is not None:
        raise PermissionError(errno.EPERM, "another user made it", str(path))


class LogFile:
    """A log of at most two files of `most_bytes` (`NAME` and `NAME.1`, mode 0600), written by a thread of its own.

    `add` never waits. Lines that the disk does not take in time, or not at all, are dropped and counted; once it takes
    lines again, `notice(how many)` is written in their place. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path, most_bytes: int, notice: Callable[[int], str]) -> None:
        self.path = path
        self.dropped = 0
        self._most_bytes = most_bytes
        self._notice = notice
        self._lines: deque[bytes] = deque()
        self._added_bytes = self._taken_bytes = 0  # each is written by one thread only
        self._lost = 0  # lines that the disk refused; written by the thread
        self._noted = 0
        self._wake = threading.Event()
        self._closed = False
        self._descriptor: int | None = self._open()
        self._size = os.fstat(self._descriptor).st_size
        self._thread: threading.Thread | None = None

    def add(self, line: str) -> None:
        """Queue a line."""
        data = line.encode("utf-8", "replace") + b"\n"
        if self._closed or self._added_bytes - self._taken_bytes > WAITING_BYTES:
            self.dropped += 1
            return
        self._added_bytes += len(data)
        self._lines.append(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"log-{self.path.name}", daemon=True)
            self._thread.start()
        if not self._wake.is_set():  # set() takes a lock, for each line of a flood
            self._wake.set()

    def drain(self, limit_s: float) -> bool:
        """Wait until all lines are written, at most so long; return whether they are. Blocking."""
        end_s = time.monotonic() + limit_s
        while self._added_bytes != self._taken_bytes:
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """Write what waits, for at most a second, and stop. A disk that blocks keeps nothing alive."""
        self.drain(CLOSE_S)
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._thread is None:
            self._shut()

    @property
    def lines_lost(self) -> int:
        """Return how many lines are in no file: dropped here, or refused by the disk."""
        return self.dropped + self._lost

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._lines:
                self._write_waiting()
                if not self._closed:
                    time.sleep(PAUSE_S)
            if self._closed:
                self._shut()
                return

    def _write_waiting(self) -> None:
        """Write what waits in few calls: a thread that runs Python holds up the event loop by up to 5 ms a time."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        size = sum(map(len, lines))
        if size <= self._most_bytes:
            self._write(lines, size)
        else:
            for line in lines:
                self._write([line], len(line))
        self._taken_bytes += size

    def _write(self, lines: list[bytes], size: int) -> None:
        lost = self.lines_lost
        if lost > self._noted:
            lines = [self._notice(lost - self._noted).encode() + b"\n", *lines]
        try:
            if self._size and self._size + size > self._most_bytes:
                self._rotate()
            self._append(b"".join(lines))
            self._noted = lost
        except OSError:
            self._lost += len(lines) - (lost > self._noted)

    def _append(self, data: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self._size += written
            view = view[written:]

    def _rotate(self) -> None:
        self._shut()
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self._size = 0
        self._descriptor = self._open()

    def _open(self) -> int:
        # The mode is set when it is created, not after: there is no moment in which others can read it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        try:
            _refuse_anothers(descriptor, self.path.absolute())
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _shut(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
