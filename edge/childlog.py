"""The engines' log lines: a ring in memory, and two files of 4 MiB in the run folder (tmpfs, so no flash wear)."""

from __future__ import annotations

import logging
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from edge.ring import Ring

FILE_BYTES = 4 << 20


class _Quiet(RotatingFileHandler):
    """A handler that drops lines that cannot be written, instead of printing a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record."""


class ChildLog:
    """One model's log. Without a writable folder only the ring is kept."""

    def __init__(self, folder: Path, name: str) -> None:
        self.ring = Ring()
        self.path = folder / f"{name}.log"
        self._handler: _Quiet | None = None
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._handler = _Quiet(self.path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")

    def add(self, line: str) -> None:
        self.ring.add(line)
        if self._handler is not None:
            self._handler.emit(logging.LogRecord("engine", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()
