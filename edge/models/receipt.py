"""The receipt of an installed model: `source.json` beside its files, written before they appear in the store."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, to_builtins

from edge.linux.files import read_json
from edge.models.quant import public_name

FILE_NAME = "source.json"
SCHEMA = 1


class InstalledFile(Struct, frozen=True):
    """One file. `path` is relative to the receipt; `sha256` was computed on arrival.

    `expected` is the hash that the source or the catalogue gave, None where neither did: nothing was verified then.
    """

    path: str
    bytes: int
    sha256: str
    expected: str | None = None


class Receipt(Struct, frozen=True):
    """`source` is the requested source without secrets; `revision` is its commit, where there is one."""

    source: str
    files: tuple[InstalledFile, ...]
    revision: str | None = None
    at: str | None = None  # UTC, ISO 8601
    notes: tuple[str, ...] = ()
    name: str | None = None  # public name where the file's own is another (the catalogue's, or one that was given)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_builtins(self)}

    def file(self, path: str) -> InstalledFile | None:
        return next((file for file in self.files if file.path == path), None)

    def sha256_of(self, path: str) -> str | None:
        found = self.file(path)
        return found.sha256 if found else None


def now_utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(path: Path, note: Receipt | None) -> str:
    """Return the stable public id of a model file."""
    return note.name if note and note.name else public_name(str(path))


def read(folder: Path) -> Receipt | None:
    """Read the receipt of a folder; None when it is missing or unreadable (the files are usable without)."""
    try:
        data = read_json(folder / FILE_NAME)
        # A newer edgellm wrote it: its files are good, its meaning is unknown here.
        return convert(data, Receipt) if data["schema"] <= SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError):  # msgspec's ValidationError is a ValueError
        return None
