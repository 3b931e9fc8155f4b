"""Read a model's file into the page cache ahead of the engine, with several requests in flight.

Run as a script (`python -I -S prefetch.py [--idle] ENGINE_PID LEAST_BYTES FILE...`), which imports nothing of edge.
llama.cpp reads tensors one after the other; four streams keep an NVMe drive busier. That helps or hurts by board: it
runs beside a start only if `edgellm bench load --apply` found that it helps. What is in the page cache is skipped. It
ends with its parent, when the engine is gone, and when MemAvailable falls to LEAST_BYTES.
"""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

STREAMS = 4
CHUNK_BYTES = 8 << 20
# More than the kernel reads ahead by itself: /sys/block/*/queue/read_ahead_kb is mostly 128, and rarely above 4096.
OVERTAKEN = 2
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def start(files: Sequence[str], engine_pid: int, least_bytes: int, *, idle: bool = False) -> "subprocess.Popen[bytes]":
    """Start the script for these files, in order. `idle`: one stream that any other reader of the disk passes."""
    command = [sys.executable, "-I", "-S", __file__, *(["--idle"] if idle else []), str(engine_pid), str(least_bytes)]
    command += files
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, close_fds=True)


class Prefetch:
    """The chunks of one file, taken in order by several threads."""

    def __init__(
        self,
        path: str,
        engine_pid: int,
        least_bytes: int,
        *,
        ends_when_overtaken: bool = False,
        streams: int = STREAMS,
    ) -> None:
        """`ends_when_overtaken`: pages that it has not read show an engine ahead of it, which it would slow down."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._descriptor).st_size
        self._engine_pid = engine_pid
        self._least_bytes = least_bytes
        self._ends_when_overtaken = ends_when_overtaken
        self._began = False
        self._skipped = 0  # chunks in a row since the last one that it read
        self._streams = streams
        self._lock = threading.Lock()
        self._next = 0
        self.stopped = False
        self.read_bytes = 0

    def run(self) -> None:
        threads = [threading.Thread(target=self._stream) for _ in range(self._streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(self._descriptor)

    def _stream(self) -> None:
        buffer = bytearray(CHUNK_BYTES)
        while (offset := self._take()) is not None:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError:
                self.stopped = True
                return
            with self._lock:
                self.read_bytes += count

    def _take(self) -> "int | None":
        """Return the offset of the next chunk to read, or None at the end or when there is a reason to stop."""
        with self._lock:
            while not self.stopped and self._next < self._size:
                offset, self._next = self._next, self._next + CHUNK_BYTES
                # In the page cache: the engine has overtaken this, or an earlier start has left it.
                if not is_resident(self._descriptor, offset, min(CHUNK_BYTES, self._size - offset)):
                    gone = not Path(f"/proc/{self._engine_pid}").exists()
                    self.stopped = gone or available() < self._least_bytes
                    self._skipped = 0
                    self._began = True
                    return None if self.stopped else offset
                self._skipped += 1
                self.stopped = self._ends_when_overtaken and self._began and self._skipped >= OVERTAKEN
            return None


def is_resident(descriptor: int, offset: int, length: int) -> bool:
    """Return whether the first and the last page of a range are in the page cache (mincore(2))."""
    libc = ctypes.CDLL(None)
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=offset) as window:
        view = ctypes.c_char.from_buffer(window)
        answer = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(length), answer)
        del view  # mmap cannot be closed while the buffer is exported
    return not failed and bool(answer.raw[0] & 1) and bool(answer.raw[-1] & 1)


def available() -> int:
    """Return MemAvailable in bytes; 0 where it is unknown."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _idle_disk() -> None:
    """Set the I/O class of this process to idle (ioprio_set(2)); schedulers without classes ignore it."""
    number = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)  # <asm/unistd.h>: glibc has no wrapper
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, 3 << 13)  # IOPRIO_WHO_PROCESS, self, IOPRIO_CLASS_IDLE


def main(arguments: Sequence[str]) -> int:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 0
    idle = arguments[0] == "--idle"
    if idle:
        arguments = arguments[1:]
        os.nice(19)
        _idle_disk()
    for path in arguments[2:]:
        reader = Prefetch(path, int(arguments[0]), int(arguments[1]), streams=1 if idle else STREAMS)
        reader.run()
        if reader.stopped:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
