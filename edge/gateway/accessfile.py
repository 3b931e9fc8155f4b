"""Write the lines of the access log: to a bounded file, and to the logger `edge.access`."""

from __future__ import annotations

import logging
import os
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from edge.errors import ConfigError
from edge.gateway import accesslog
from edge.units import MIB

SIZE_BYTES = 4 * MIB

_logger = logging.getLogger("edge.access")


class AccessLog:
    """Two files of at most SIZE_BYTES each; none with `path` None. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: Path | None, *, as_json: bool = False) -> None:
        self._render = accesslog.render_json if as_json else accesslog.render_text
        self._file: RotatingFileHandler | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = _PrivateFile(path, maxBytes=SIZE_BYTES, backupCount=1, encoding="utf-8")
            except OSError as error:
                hint = "set access_log in [gateway] to a file that can be written"
                raise ConfigError(f"cannot open {path}: {error.strerror}", hint) from error
            self._file.setFormatter(logging.Formatter("%(asctime)s %(message)s" if not as_json else "%(message)s"))

    @property
    def wanted(self) -> bool:
        return self._file is not None or _logger.isEnabledFor(logging.INFO)

    def write(self, entry: accesslog.AccessEntry) -> None:
        record = logging.makeLogRecord({"name": _logger.name, "levelno": logging.INFO, "levelname": "INFO"})
        record.msg = self._render(entry)
        if self._file is not None:
            self._file.handle(record)
        if _logger.isEnabledFor(logging.INFO):
            _logger.handle(record)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _PrivateFile(RotatingFileHandler):
    """A log file with mode 0600, also after rotation: it holds key names, and prompts where they are turned on."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")
