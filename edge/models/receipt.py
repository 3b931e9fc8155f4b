"""The receipt of an installed model: `source.json` beside its files, written before they appear in the store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from edge.linux.files import read_json, sha256_file
from edge.models.quant import public_name

FILE_NAME = "source.json"
SCHEMA = 1


class InstalledFile(Struct, frozen=True):
    """One file. `path` is relative to the receipt; `sha256` was computed on arrival.

    `expected` is the hash that the source or the catalogue gave, None where neither did: nothing was verified then.
    `inode` and `ctime_ns` (stat(2)) as the file arrived: a later write changes the second, which no program can set;
    so does a link, a rename or another mode. None in a receipt of an older edgellm.
    """

    path: str
    bytes: int
    sha256: str
    expected: str | None = None
    inode: int | None = None
    ctime_ns: int | None = None

    def arrived(self, path: Path) -> InstalledFile:
        """Return it with what identifies the file at `path`. Raises OSError."""
        state = path.stat()
        return replace(self, inode=state.st_ino, ctime_ns=state.st_ctime_ns)

    def changed(self, path: Path) -> bool:
        """Return whether the file at `path` is gone, or may have been written to since it arrived."""
        try:
            return not self.untouched(path)
        except OSError:
            return True

    def untouched(self, path: Path) -> bool:
        """Return whether nothing has written to the file at `path` since it arrived. Raises OSError.

        With an older receipt the size decides.
        """
        state = path.stat()
        if self.inode is None:
            return state.st_size == self.bytes
        return (state.st_size, state.st_ino, state.st_ctime_ns) == (self.bytes, self.inode, self.ctime_ns)


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


def now_utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(path: Path, note: Receipt | None) -> str:
    """Return the stable public id of a model file."""
    return note.name if note and note.name else public_name(str(path))


def read_of(path: Path) -> Receipt | None:
    """Read the receipt of a file; None for one that the receipt beside it does not list: it came another way."""
    note = read(path.parent)
    return note if note and (note.file(path.name) or not note.files) else None


def as_trusted(note: Receipt | None, folder: Path, stores: Iterable[Path]) -> Receipt | None:
    """Return the receipt of a folder outside of our stores without the hashes of its source: any program writes one."""
    if note is None or any(store.resolve() in folder.resolve().parents for store in stores):
        return note
    files = tuple(replace(file, expected=None) for file in note.files)
    return replace(note, files=files, notes=(*note.notes, "source and hash are what the note beside the file states"))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file: as recorded on arrival if nothing has written to it since, else read. OSError."""
    note = read(path.parent)
    known = note.file(path.name) if note else None
    return known.sha256 if known and known.untouched(path) else sha256_file(path)


def is_whole(folder: Path, names: Iterable[str]) -> bool:
    """Return whether a model's folder holds these files as they arrived; what may have been written to since is read.

    Of a receipt that a newer edgellm wrote the meaning is unknown: its files count as good.
    """
    note = read(folder)
    if note is None:
        return _is_newer(folder)
    files = [note.file(name) for name in names]
    try:
        return all(
            file is not None
            and (folder / file.path).stat().st_size == file.bytes
            and sha256_of(folder / file.path) == file.sha256
            for file in files
        )
    except OSError:
        return False


def _is_newer(folder: Path) -> bool:
    try:
        return bool(read_json(folder / FILE_NAME)["schema"] > SCHEMA)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read(folder: Path) -> Receipt | None:
    """Read the receipt of a folder; None when it is missing or unreadable (the files are usable without)."""
    try:
        data = read_json(folder / FILE_NAME)
        # A newer edgellm wrote it: its files are good, its meaning is unknown here.
        return convert(data, Receipt) if data["schema"] <= SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError):  # msgspec's ValidationError is a ValueError
        return None


def address(path: Path) -> str | None:
    """Return the SHA-256 that a content-addressed store gave the file as its name: a blob of Ollama or of the hub."""
    match = re.fullmatch(r"(?:sha256-)?([0-9a-f]{64})", path.resolve().name)
    return match[1] if match else None
