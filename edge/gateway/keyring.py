"""The key file on disk, and the key ring that a running gateway reads from it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from edge.errors import ConfigError
from edge.gateway import keys
from edge.gateway.keys import Key
from edge.linux.files import write_atomic
from edge.resources import load_toml

log = logging.getLogger("edge.gateway")


def read(path: Path) -> tuple[Key, ...]:
    """No file, no keys. Raises ConfigError."""
    try:
        return keys.parse(load_toml(path))
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a TOML file", "edgellm key add writes it; move it away to start over"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "it must belong to the user that runs edgellm"
        ) from error


def write(path: Path, entries: Iterable[Key]) -> None:
    """At once or not at all; readable by its owner only, and its owner stays who it was. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat() if path.exists() else None
        write_atomic(path, keys.render(entries))
        if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(path, before.st_uid, before.st_gid)  # root edits for a service that runs as somebody else
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "run it as the file's owner, or with sudo"
        ) from error


class KeyRing:
    """Keys as they are in the file now: a revoked key stops working with the next request.

    `required`: other machines can reach us, so that an empty ring lets nobody in.
    """

    def __init__(self, path: Path | None, *, required: bool = False) -> None:
        self._path = path
        self.required = required
        self._keys: tuple[Key, ...] = ()
        self._broken = False
        self._stamp: tuple[int, int, int] | None = None
        if path is not None:
            self._keys = read(path)
            self._stamp = _stamp(path)

    @property
    def needed(self) -> bool:
        """Must a request carry a key?"""
        return self.required or self._broken or bool(self._keys)

    @property
    def empty(self) -> bool:
        return not self._keys

    def find(self, secret: str) -> Key | None:
        return keys.find(self._keys, secret) if self._keys else None

    def refresh(self) -> None:
        """One stat per request. A file that cannot be read any longer lets nobody in: it may have held revocations."""
        if self._path is None:
            return
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read(self._path)
            self._broken = False
        except ConfigError as error:
            self._keys = ()
            self._broken = True
            log.error("keys: %s; nobody is let in until it can be read", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino, status.st_size
