"""Free space, streaming copies and hashed downloads for pull, import and quantize."""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from edge.errors import DoesNotFitError
from edge.models.progress import TransferMeter
from edge.units import format_bytes

_SPARE_BYTES = 64 * 1024 * 1024  # a full disk breaks more than a pull
CHUNK_BYTES = 1024 * 1024


def need_space(folder: Path, count: int) -> None:
    """Raise DoesNotFitError if `count` more bytes would fill the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < count + _SPARE_BYTES:
        raise DoesNotFitError(
            f"{format_bytes(count)} are needed under {folder}, {format_bytes(free)} are free",
            "make room (edgellm model list; edgellm model remove NAME), or take a smaller quant",
        )


def copy(source: IO[bytes], target: IO[bytes], meter: TransferMeter) -> str:
    """Copy a stream to its end and return the SHA-256 in hex."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
        meter.add(len(chunk))
    return digest.hexdigest()


# Child processes that end with their parent, also after SIGKILL, so that none writes while the next attempt does.

# The death signal survives exec; the parent is looked at again in case it was gone before the signal was set.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return `command` for a process that dies with the calling process (PR_SET_PDEATHSIG, prctl(2))."""
    return [sys.executable, "-I", "-c", _TIED, str(os.getpid()), *command]


# Append chunks to a file and hash them on a thread of its own, beside the thread that receives them.

_BATCH_BYTES = 512 * 1024  # what is handed over at once
_BATCH_CHUNKS = 512  # the kernel takes 1024 pieces in one write
_QUEUED = 4  # batches: bounds memory when the network is faster than disk and hash


class Sink:
    """A file that grows, as a context manager. `keep` bytes of its content are kept and hashed first.

    `size` counts the bytes passed in; they are on disk when the context has ended without an error.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._hash = hashlib.sha256()
        self._file = path.open("r+b" if keep else "wb", buffering=0)
        if keep:
            self._file.truncate(keep)
            while chunk := self._file.read(CHUNK_BYTES):
                self._hash.update(chunk)
        self.size = keep
        self._batch: list[bytes] = []
        self._held = 0
        self._failed: OSError | None = None
        self._queue: queue.Queue[list[bytes] | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._work, name="sink", daemon=True)

    def __enter__(self) -> Sink:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(self._batch)
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        if self._failed and error is None:
            raise self._failed

    def write(self, chunk: bytes) -> None:
        """Queue a chunk. Raises the OSError of a former write, e.g. ENOSPC."""
        self._batch.append(chunk)
        self._held += len(chunk)
        self.size += len(chunk)
        if self._held >= _BATCH_BYTES or len(self._batch) >= _BATCH_CHUNKS:
            if self._failed:
                raise self._failed
            self._queue.put(self._batch)
            self._batch, self._held = [], 0

    def digest(self) -> str:
        """Return the SHA-256 in hex, after the context has ended."""
        return self._hash.hexdigest()

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._failed is None and batch:
                self._take(batch)

    def _take(self, batch: list[bytes]) -> None:
        try:
            written = os.writev(self._file.fileno(), batch)
            for chunk in batch:
                self._hash.update(chunk)
                if written < len(chunk):  # a full disk takes part of it; the next write raises ENOSPC
                    self._rest(memoryview(chunk)[max(0, written) :])
                written -= len(chunk)
        except OSError as error:
            self._failed = error

    def _rest(self, view: memoryview) -> None:
        while view:
            view = view[self._file.write(view) :]
