"""The receipt of an installed model: `source.json` beside its files, written before they appear in the store."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from edge.models.quant import public_name

FILE_NAME = "source.json"
SCHEMA = 1


class InstalledFile(Struct, frozen=True):
    """One file as it was verified. `path` is relative to the receipt."""

    path: str
    bytes: int
    sha256: str


class Receipt(Struct, frozen=True):
    """`source` is the requested source without secrets; `revision` is its commit, where there is one."""

    source: str
    files: tuple[InstalledFile, ...]
    revision: str | None = None
    at: str | None = None  # UTC, ISO 8601
    notes: tuple[str, ...] = field(default=())
    name: str | None = None  # public name where the file's own is another (the catalogue's, or one that was given)

    def to_json(self) -> dict[str, Any]:
        files = [{"path": file.path, "bytes": file.bytes, "sha256": file.sha256} for file in self.files]
        return {
            "schema": SCHEMA,
            "name": self.name,
            "source": self.source,
            "revision": self.revision,
            "at": self.at,
            "files": files,
            "notes": list(self.notes),
        }

    def sha256_of(self, path: str) -> str | None:
        return next((file.sha256 for file in self.files if file.path == path), None)


def now_utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(path: Path, note: Receipt | None) -> str:
    """Return the stable public id of a model file."""
    return note.name if note and note.name else public_name(str(path))


def read(folder: Path) -> Receipt | None:
    """Read the receipt of a folder; None when it is missing or unreadable (the files are usable without)."""
    try:
        data = json.loads((folder / FILE_NAME).read_bytes())
        if data["schema"] > SCHEMA:
            return None
        files = tuple(InstalledFile(str(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in data["files"])
        notes = tuple(str(note) for note in data.get("notes", ()))
        return Receipt(str(data["source"]), files, data.get("revision"), data.get("at"), notes, data.get("name"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
