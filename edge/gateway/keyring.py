"""Read and write the key file, and follow its changes while the gateway runs."""

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
    """Return the keys in the file, none if there is no file. Raises ConfigError."""
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
    """Replace the file atomically, with mode 0600 and its former owner. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat() if path.exists() else None
        write_atomic(path, keys.render(entries))
        if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(path, before.st_uid, before.st_gid)  # root edits the file of the service's user
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "run it as the file's owner, or with sudo"
        ) from error


class KeyRing:
    """The keys that are in the file now: a revoked key stops working with the next request.

    `required`: other machines reach this server, so that without any key every request is rejected.
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
        """Return whether a request must carry a key."""
        return self.required or self._broken or bool(self._keys)

    @property
    def empty(self) -> bool:
        return not self._keys

    def find(self, secret: str) -> Key | None:
        return keys.find(self._keys, secret) if self._keys else None

    def refresh(self) -> None:
        """Read the file again if it changed, which costs one stat a request.

        While the file cannot be read every request is rejected: the change may have been a revocation.
        """
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
            log.error("keys: %s; all requests are rejected until it can be read", error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino, status.st_size
