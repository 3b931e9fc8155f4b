"""The engines' own lines: a ring in memory, and two files of 4 MiB in the run folder (tmpfs: no flash wear)."""

from __future__ import annotations

import logging
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from edge.ring import Ring

FILE_BYTES = 4 << 20


class _Quiet(RotatingFileHandler):
    """Drops what a full disk refuses: a log line is worth no traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing to do."""


class ChildLog:
    """One model's log. A file that cannot be written costs the file, not the start."""

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
