"""The saved prompts on disk: llama.cpp's slot files in one private folder, each named by its key and its own hash.

A name is `KEY-HASH.slot`: the key identifies model, engine and context, the hash is the file's SHA-256. A rename makes
a file valid in one step, so that a kill at any moment leaves the old files. While the engine writes a file it ends in
`.part`, while it reads one in `.reading`: what still has such a name at the next start is removed, since a write was
cut off, or the engine died of what it read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from edge.linux.files import private_dir, sha256_file

# LLAMA_STATE_SEQ_MAGIC ("ggsq") of llama.h; version and number of tokens follow, then the tokens, 4 bytes each.
_MAGIC = 0x67677371
_HEADER = struct.Struct("=III")
_VALID, _WRITING, _READING = ".slot", ".part", ".reading"
_KEY_CHARACTERS = 16
_SAME = 0.9  # of a saved prompt: the end of a message and of an answer differ when a conversation goes on


def file_key(*parts: str) -> str:
    """Return the first part of a name. Different parts give different keys."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_CHARACTERS]


class PromptFiles:
    """The files of one folder, those of all models at most `limit_bytes`. Blocking; a fault costs only one file."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def newest(self, key: str, most: int) -> list[Path]:
        """Return at most `most` undamaged files of a key, newest first. Damaged and cut-off ones are removed."""
        found: list[Path] = []
        for path in self._by_age():
            if not path.name.startswith(f"{key}-"):
                continue
            if path.suffix != _VALID or (len(found) < most and not _is_whole(path)):
                _remove(path)
            elif len(found) < most:
                found.append(path)
        return found

    def begin_write(self, key: str, expected_bytes: int) -> str | None:
        """Return a name for the engine to write to; None where the file would not fit or the disk is nearly full."""
        if expected_bytes > self.limit_bytes:
            return None
        try:
            private_dir(self.folder)
            free = os.statvfs(self.folder)
        except OSError:
            return None
        if free.f_bavail * free.f_frsize < self.limit_bytes + expected_bytes:
            return None
        return f"{key}-{secrets.token_hex(16)}{_WRITING}"

    def keep(self, name: str) -> Path | None:
        """Make a written file valid, in place of the saved prompts that it continues; None if it is no slot file."""
        written = self.folder / name
        tokens = _tokens(written)
        if tokens is None:
            _remove(written)
            return None
        key = name.partition("-")[0]
        try:
            written.chmod(0o600)
            with written.open("rb") as file:
                os.fsync(file.fileno())
            valid = written.with_name(f"{key}-{sha256_file(written)}{_VALID}")
            written.replace(valid)
        except OSError:
            _remove(written)
            return None
        for other in self._by_age():
            if other != valid and other.name.startswith(f"{key}-") and other.suffix == _VALID:
                former = _tokens(other)
                if former is not None and _common(tokens, former) >= _SAME * len(former):
                    _remove(other)
        self._evict()
        return valid if valid.exists() else None

    def begin_read(self, path: Path) -> str | None:
        """Rename a file for the time of its reading and return the name; None if it is gone."""
        reading = path.with_suffix(_READING)
        try:
            path.replace(reading)
        except OSError:
            return None
        return reading.name

    def end_read(self, path: Path, *, good: bool) -> None:
        """Give a file its name back as the newest one, or remove what the engine refused."""
        reading = path.with_suffix(_READING)
        if not good:
            _remove(reading)
            return
        with suppress(OSError):
            os.utime(reading)
            reading.replace(path)

    def _evict(self) -> None:
        """Remove the files that were used longest ago until the rest is within the limit."""
        total = 0
        for path in self._by_age():
            total += _size(path)
            # A write of now is among the newest; what a former key left half written goes with the oldest.
            if total > self.limit_bytes and path.suffix != _READING:
                _remove(path)

    def _by_age(self) -> Iterator[Path]:
        """Yield our files, the last used first."""
        try:
            found = [path for path in self.folder.iterdir() if path.suffix in (_VALID, _WRITING, _READING)]
        except OSError:
            return
        yield from sorted(found, key=lambda path: (_changed_ns(path), path.name), reverse=True)


def _is_whole(path: Path) -> bool:
    """Return whether only this user could write the file, and its content has the hash of its name."""
    try:
        state = path.lstat()
        ours = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022
        return ours and path.stem.rpartition("-")[2] == sha256_file(path)
    except OSError:
        return False


def _tokens(path: Path) -> bytes | None:
    """Return the tokens of a slot file as they are stored; None for any other file."""
    try:
        with path.open("rb") as file:
            magic, _, count = _HEADER.unpack(file.read(_HEADER.size))
            size = os.fstat(file.fileno()).st_size
            # The state itself follows the tokens: a file that ends with them was cut off.
            if magic != _MAGIC or _HEADER.size + 4 * count >= size:
                return None
            return file.read(4 * count)
    except (OSError, struct.error):
        return None


def _common(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _changed_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
