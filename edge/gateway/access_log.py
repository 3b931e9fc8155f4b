"""Render the access log: one line a request, as text or JSON; prompts only if they are turned on. Pure."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.errors import ConfigError
from edge.linux.best_effort import LogFile
from edge.units import MIB

# Enough to recognize a request; a prompt may have megabytes, and the file holds 4 MiB.
_PROMPT_CHARACTERS = 2000


class AccessEntry(Struct, frozen=True):
    """One request. Times in seconds, None where unknown.

    `outcome`: ok, gone (the client left), cut (the engine died in mid-answer), error (the
    engine reported one, or its stream lacks its end), refused (by the gateway), bug.
    """

    method: str
    route: str
    code: int
    took_s: float
    outcome: str = "ok"
    key: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    retried: bool = False
    prompt: str | None = None
    joules: float | None = None  # estimated

    def recent(self) -> dict[str, Any]:
        """Return what the status page shows of it: no key and no prompt."""
        names = ("route", "code", "outcome", "took_s", "model", "prompt_tokens", "completion_tokens", "tokens_per_s")
        return {name: getattr(self, name) for name in names}


def render_json(entry: AccessEntry) -> str:
    document: dict[str, Any] = {}
    for name in AccessEntry.__struct_fields__:
        value = getattr(entry, name)
        if value is not None:
            document[name] = round(value, 4) if isinstance(value, float) else value
    return json.dumps(document, ensure_ascii=True)


def render_text(entry: AccessEntry) -> str:
    """Return `POST /v1/chat/completions 200 ok 1.52s key=laptop model=chat tokens=31+120 first=0.08s 41.3 tok/s`."""
    parts = [entry.method, entry.route, str(entry.code), entry.outcome, f"{entry.took_s:.3f}s"]
    if entry.key is not None:
        parts.append(f"key={_plain(entry.key)}")
    if entry.model is not None:
        parts.append(f"model={_plain(entry.model)}")
    if entry.prompt_tokens is not None or entry.completion_tokens is not None:
        parts.append(f"tokens={_count(entry.prompt_tokens)}+{_count(entry.completion_tokens)}")
    if entry.first_token_s is not None:
        parts.append(f"first={entry.first_token_s:.3f}s")
    if entry.tokens_per_s is not None:
        parts.append(f"{entry.tokens_per_s:.1f} tok/s")
    if entry.joules is not None:
        parts.append(f"~{entry.joules:.1f} J")
    if entry.retried:
        parts.append("retried")
    if entry.prompt is not None:
        parts.append(f"prompt={json.dumps(entry.prompt)}")
    return " ".join(parts)


def prompt(body: bytes | None) -> str | None:
    """Return the first _PROMPT_CHARACTERS of a request's body, for `log_prompts`."""
    return None if body is None else body.decode("utf-8", "replace")[:_PROMPT_CHARACTERS]


def _plain(text: str) -> str:
    """Quote a name that could forge a second line or another field."""
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


# Write the lines of the access log: to a bounded file, and to the logger `edge.access`.

SIZE_BYTES = 4 * MIB

_logger = logging.getLogger("edge.access")


class AccessLog:
    """Two files of at most SIZE_BYTES each; none with `path` None. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: Path | None, *, as_json: bool = False) -> None:
        self._render = render_json if as_json else render_text
        self._formatter = logging.Formatter("%(message)s" if as_json else "%(asctime)s %(message)s")
        self._file: LogFile | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LogFile(path, SIZE_BYTES, _dropped_json if as_json else _dropped_text)
            except OSError as error:
                hint = "set access_log in [gateway] to a file that can be written"
                raise ConfigError(f"cannot open {path}: {error.strerror}", hint) from error

    @property
    def wanted(self) -> bool:
        return self._file is not None or _logger.isEnabledFor(logging.INFO)

    @property
    def lines_lost(self) -> int:
        return self._file.lines_lost if self._file is not None else 0

    def write(self, entry: AccessEntry) -> None:
        """Have the line written; the disk is waited for by another thread."""
        # Made by hand: Logger.info would look up the caller's frame for every request.
        record = logging.makeLogRecord({"name": _logger.name, "levelno": logging.INFO, "levelname": "INFO"})
        record.msg = self._render(entry)
        if self._file is not None:
            self._file.add(self._formatter.format(record))
        if _logger.isEnabledFor(logging.INFO):
            _logger.handle(record)

    def drain(self) -> None:
        """Wait up to 10 s until the lines are in the file. Blocking."""
        if self._file is not None:
            self._file.drain(10.0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _dropped_json(count: int) -> str:
    return json.dumps({"dropped_lines": count})


def _dropped_text(count: int) -> str:
    return f"{count} lines were dropped: the disk did not take them in time"
