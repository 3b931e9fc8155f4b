"""A file that grows by appended chunks while its SHA-256 is computed beside, on a thread (hashing frees the GIL)."""

from __future__ import annotations

import hashlib
import queue
import threading
from pathlib import Path
from types import TracebackType

from edge.model.disk import CHUNK_BYTES

_QUEUED = 64  # chunks of some 64 KiB: bounds memory when the disk is faster than the hash


class Sink:
    """Use as a context manager. `digest` of what is in the file, also of what was there before (`keep` bytes)."""

    def __init__(self, path: Path, keep: int) -> None:
        self._hash = hashlib.sha256()
        self._file = path.open("r+b" if keep else "wb", buffering=0)
        if keep:
            self._file.truncate(keep)
            while chunk := self._file.read(CHUNK_BYTES):
                self._hash.update(chunk)
        self.size = keep
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._work, name="sha256", daemon=True)

    def __enter__(self) -> Sink:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) :]
        self.size += len(chunk)
        self._queue.put(chunk)

    def digest(self) -> str:
        """Hex. Only after the context has ended."""
        return self._hash.hexdigest()

    def _work(self) -> None:
        while (chunk := self._queue.get()) is not None:
            self._hash.update(chunk)
