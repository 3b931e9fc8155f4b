"""Make and compare API keys, keep them as hashes in a file, and follow its changes while the gateway runs."""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import secrets
import shlex
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from edge.errors import ConfigError, UsageError
from edge.linux.files import has_own_group, open_to_others, try_lock, write_atomic
from edge.paths import our_users, prepared_by_another
from edge.resources import load_toml

PREFIX = "sk-edge-"
# For a key that the user brings. Generated ones have 256 random bits, so a plain SHA-256 is enough at rest: they cannot
# be guessed, and a slow hash would cost its time on every request.
MIN_CHARACTERS = 20
_NAME_CHARACTERS = 64
LOCK_S = 10.0  # a change of the file takes milliseconds


class Key(Struct, frozen=True):
    """One key. `sha256` in hex, of the key's UTF-8 bytes; `created` is a date for display."""

    name: str
    sha256: str
    admin: bool = False
    created: str = ""


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def make(name: str, secret: str, *, admin: bool, created: str, others: Iterable[Key]) -> Key:
    """Return a key, checked against those in `others`. Raises UsageError."""
    if not name or len(name) > _NAME_CHARACTERS or not name.isprintable() or any(c in '"\\' for c in name):
        raise UsageError(f"not a name for a key: {name[:80]!r}", "use letters, digits, spaces and - _ . @")
    if any(key.name == name for key in others):
        raise UsageError(f"there is a key named {name!r} already", f"edgellm key revoke {shlex.quote(name)}")
    if len(secret) < MIN_CHARACTERS or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise UsageError("this key is too easy to guess", f"give at least {MIN_CHARACTERS} random characters")
    same = find(others, secret)
    if same is not None:  # revoked under one name it would be accepted under the other
        raise UsageError(f"this key is there already, named {same.name!r}", "one secret has one name")
    return Key(name, digest(secret), admin, created)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def find(keys: Iterable[Key], secret: str) -> Key | None:
    """Return the key with this secret, in constant time: every key is compared."""
    hashed = digest(secret)
    found: Key | None = None
    for key in keys:
        if hmac.compare_digest(key.sha256, hashed):
            found = key
    return found


def presented(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets of a request: of `Authorization: Bearer …`, and of `x-api-key` as Anthropic's clients send it.

    Both, since a proxy in between may add an `Authorization` of its own.
    """
    value = headers.get("Authorization", "")
    # A value without a scheme is taken as the key: some clients leave `Bearer` out.
    scheme, _, rest = value.partition(" ")
    bearer = rest.strip() if scheme.lower() == "bearer" and rest else value
    return tuple(each for each in (bearer, headers.get("x-api-key")) if each)


def parse(document: Mapping[str, Any]) -> tuple[Key, ...]:
    """Read the keys of a parsed `keys.toml`. Raises ConfigError, whose message never repeats a value of the file."""
    schema = document.get("schema", 1)
    if type(schema) is not int or schema > 1:
        raise ConfigError("keys.toml was written by a newer edgellm", "update edgellm")
    entries = document.get("key", [])
    if not isinstance(entries, list):
        raise ConfigError("keys.toml: [[key]] must be a list of tables")
    return tuple(_entry(number, entry) for number, entry in enumerate(entries, 1))


def _entry(number: int, entry: Any) -> Key:
    table = entry if isinstance(entry, dict) else {}
    name, sha256 = table.get("name"), table.get("sha256")
    admin, created = table.get("admin", False), table.get("created", "")
    if not isinstance(name, str) or not isinstance(admin, bool) or not _is_digest(sha256):
        hint = "each [[key]] has name and sha256; edgellm key add writes them"
        raise ConfigError(f"keys.toml: entry {number} is not a key", hint)
    return Key(name, str(sha256), admin, str(created))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def render(keys: Iterable[Key]) -> str:
    """Return the text of `keys.toml`."""
    import tomli_w  # late: only commands write keys

    head = "# Written by `edgellm key`. Holds hashes only: a lost key cannot be read back, make a new one.\n"
    return head + tomli_w.dumps({"schema": 1, "key": [to_builtins(key) for key in keys]})


log = logging.getLogger("edge.gateway")


def read(path: Path) -> tuple[Key, ...]:
    """Return the keys in the file, none if there is no file. Raises ConfigError."""
    return parse(_document(path))


def _document(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # a FIFO would hold up the event loop until it is written
            raise ConfigError(f"{path} is no regular file", "move it away; edgellm key add writes the file")
        _refuse_prepared(path)
        _refuse_shared(path)
        return load_toml(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a TOML file", "edgellm key add writes it; move it away to start over"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "it must belong to the user that runs edgellm"
        ) from error


def _refuse_shared(path: Path) -> None:
    """Raise ConfigError for a file that others can write, or that another user put there. Raises OSError."""
    state, folder, quoted = path.stat(), path.parent.stat(), shlex.quote(str(path))
    if state.st_mode & stat.S_IWOTH:  # any user could add a key
        raise ConfigError(f"every user may write to {path}", f"chmod 600 {quoted}")
    if open_to_others(state) and not has_own_group(state):
        raise ConfigError(f"group {state.st_gid} may write to {path}", f"chmod 600 {quoted}")
    # In a closed folder no other user put it there: a service's in root's folder, a host's in a container.
    if state.st_uid not in {*our_users(os.environ), folder.st_uid} and open_to_others(folder):
        raise ConfigError(
            f"{path} belongs to user {state.st_uid}", f"look at its keys, then `chown {os.geteuid()} {quoted}`"
        )


def _refuse_prepared(path: Path) -> None:
    made = prepared_by_another(path.absolute(), os.environ)
    if made is not None:  # the keys would be theirs, or a link the file that is written
        hint = "remove it as root, or name a file in a folder of your own"
        owner = made.lstat().st_uid
        raise ConfigError(f"user {owner} made {made}, in a folder that every user may write to", hint)


def write(path: Path, entries: Iterable[Key]) -> None:
    """Replace the file atomically, with mode 0600 and its former owner. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat() if path.exists() else None
        owner = None
        if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            owner = (before.st_uid, before.st_gid)  # root edits the file of the service's user
        write_atomic(path, render(entries), owner=owner)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", _hint(error, path)) from error


def _hint(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"its disk is full: `df -h {shlex.quote(str(path.parent))}`"
    if error.errno == errno.EROFS:
        return "its file system is read-only: mount it writable"
    return "run it as the file's owner, or with sudo"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the key file's lock from its reading to its writing, so that commands in parallel lose no change.

    The lock is on the file, which no other user may open, and not on its folder: any user that may read that could hold
    its lock. The file is replaced by each change: a lock on a former one is taken again. Raises ConfigError.
    """
    _refuse_prepared(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = os.path.lexists(path)
        file = _lock(path)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}", _hint(error, path)) from error
    try:
        yield
    finally:
        # Made here and not written: no key was added.
        with suppress(OSError):
            if not existed and path.stat().st_size == 0 and os.path.samestat(os.fstat(file), path.stat()):
                path.unlink()
        os.close(file)


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock. Raises OSError after LOCK_S: the file's owner may never let it go."""
    end_s = time.monotonic() + LOCK_S
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(file):
                if time.monotonic() > end_s:
                    raise OSError(errno.EBUSY, "another process holds it")
                time.sleep(0.02)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass  # replaced or removed meanwhile: lock the next one
        except BaseException:
            os.close(file)
            raise
        os.close(file)


class KeyRing:
    """The keys that are in the file now: a revoked key stops working with the next request.

    `required`: other machines reach this server, so that without any key every request is rejected. The same holds once
    there was a key: a file that is emptied or removed does not open a running server; revoking the last key does.
    """

    def __init__(self, path: Path | None, *, required: bool = False) -> None:
        self._path = path
        self.required = required
        self._keys: tuple[Key, ...] = ()
        self._broken = False
        self._had_keys = False
        self._stamp: tuple[int, int, int] | None = None
        if path is not None:
            self._stamp = _stamp(path)  # before the reading: a change in between is seen by the first refresh
            self._keys = read(path)
            self._had_keys = bool(self._keys)

    @property
    def needed(self) -> bool:
        """Return whether a request must carry a key."""
        return self.required or self._broken or self._had_keys

    @property
    def empty(self) -> bool:
        return not self._keys

    def find(self, secret: str) -> Key | None:
        return find(self._keys, secret) if self._keys else None

    def refresh(self) -> None:
        """Read the file again if it changed, which costs one stat a request.

        While the file cannot be read every request is rejected: the change may have been a revocation.
        """
        if self._path is None:
            return
        # ctime, inode and size: an editor that keeps the mtime, or a rename in the same second, is seen too.
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            document = _document(self._path)
            self._keys = parse(document)
            self._broken = False
            # As `edgellm key revoke` writes it, `key = []`: a copy that was cut behind `schema = 1` has no list.
            revoked = not self._keys and "key" in document
            if self._had_keys and not self._keys and not revoked:
                log.error("keys: no key in %s any longer; requests are rejected until there is one", self._path)
            self._had_keys = bool(self._keys) or (self._had_keys and not revoked)
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
