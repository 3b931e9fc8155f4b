"""Append chunks to a file and hash them on a thread of its own (both release the GIL), beside the receiving thread."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from pathlib import Path
from types import TracebackType

from edge.models.disk import CHUNK_BYTES

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
