"""Read, hash, lock and atomically replace small files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from edge.linux.slow_reads import reading
from edge.paths import LINKS_MAX

CHUNK_BYTES = 1 << 20  # far above the cost of a read(2), far below the cache of a CPU
# Our largest file, the device answers of one engine, is under 100 kB; a file far beyond that is not ours.
READ_MAX_BYTES = 4 << 20
_DIGITS = 20  # of 2**64 - 1, and of -2**63 with its sign


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of write(2), fsync(2) or flock(2), which know a descriptor only, the name of its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_atomic(
    path: Path, text: str, mode: int = 0o600, *, durable: bool = True, owner: tuple[int, int] | None = None
) -> None:
    """Replace a file in one step: write beside it, sync, rename.

    Raises OSError; the former file is then unchanged. The rename itself may be lost with the power: see `write_shared`.
    Not `durable`: without a sync, for what its reader can make again if a power cut left an empty file.
    `owner`: its user and group, given before it has its name, which in a folder of another user may become a link.
    """
    import tempfile  # late: nothing is written on the way to the first child

    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with naming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if owner is not None:
                os.fchown(file.fileno(), *owner)
            if durable:
                os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def write_report(path: Path, text: str) -> None:
    """Write a file that the user named, readable by all. Raises OSError with its name.

    It is replaced in one step: a link or a FIFO that another user put in its place is neither followed nor waited for.
    Devices and /dev/fd/N of a shell are written to.
    """
    with naming(path):
        if path.absolute().parts[1:2] in (("dev",), ("proc",)):
            path.write_text(text, encoding="utf-8")
        else:
            write_atomic(path, text, 0o644, durable=False)


def write_json(path: Path, data: object) -> None:
    """Replace a JSON file that every user may read in one step. Raises OSError."""
    write_atomic(path, json.dumps(data, indent=1) + "\n", 0o644)


def write_shared(path: Path, text: str) -> None:
    """Replace a file that every user may read, create its folder, and make the rename durable. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text, 0o644)
    sync_folder(path.parent)


def private_dir(path: Path) -> None:
    """Create a folder for this user alone, or check one that exists: an owner may write to it, and no other user.

    Permissions of group and others that a lax umask gave are taken away. Raises OSError for a link, for another kind
    of file and for a folder of another user: in /tmp that user may have prepared it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # Checked and changed through one descriptor: between two calls by name the folder could be exchanged.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to user {state.st_uid}", str(path))
        if state.st_mode & 0o022:
            os.fchmod(descriptor, stat.S_IMODE(state.st_mode) & ~0o022)
    finally:
        os.close(descriptor)


def is_trusted_dir(path: Path) -> bool:
    """Return whether what lies in the folder was put there by this user, by root, or by the owner of a closed parent.

    False for a folder that another user created in a folder which every user may write to, such as /tmp.
    """
    try:
        state, parent = path.lstat(), path.parent.stat()
    except OSError:
        return False
    mine = stat.S_ISDIR(state.st_mode) and state.st_uid in (0, os.geteuid())
    return mine or not parent.st_mode & stat.S_IWOTH


def writable_by_others(path: Path, owners: frozenset[int] = frozenset({0})) -> Path | None:
    """Return the first part of a path, or of its link target, that users other than `owners` can replace.

    Raises OSError for a path that does not exist.
    """
    for end in dict.fromkeys((path, Path(os.path.realpath(path)))):
        for part in [*reversed(end.parents), end]:
            state = part.lstat()
            if state.st_uid not in owners:
                return part
            if stat.S_ISLNK(state.st_mode):
                continue  # the kernel ignores the mode of a link
            # In a sticky folder (/tmp) other users may add files, and replace none.
            sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
            if (open_to_others(state) or _has_list(part, state)) and not sticky:
                return part
    return None


def _has_list(path: Path, state: os.stat_result) -> bool:
    """Return whether an access control list may let others write; the bits of the group are then its mask (acl(5))."""
    if not state.st_mode & stat.S_IWGRP:
        return False
    try:
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    except OSError:  # none, or a file system without
        return False


def open_to_others(state: os.stat_result) -> bool:
    """Return whether the mode lets other users than the owner and root write."""
    # Group root has no members but root; other groups may get some at any time.
    others = stat.S_IWOTH | (stat.S_IWGRP if state.st_gid != 0 else 0)
    return bool(state.st_mode & others)


def has_own_group(state: os.stat_result) -> bool:
    """Return whether only the owner is in the file's group: Ubuntu makes one for each user, with a umask of 002."""
    import grp  # late, with pwd: no start asks this
    import pwd

    try:
        owner, group = pwd.getpwuid(state.st_uid), grp.getgrgid(state.st_gid)
    except KeyError:
        return False
    return owner.pw_gid == group.gr_gid and owner.pw_name == group.gr_name and {*group.gr_mem} <= {owner.pw_name}


def visible(path: Path) -> bool:
    """Return whether a path exists for this process; Path.exists() raises in a closed folder before Python 3.14."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def open_followed(path: Path, ours: Collection[int]) -> int:
    """Open a file for reading; a link of a user other than `ours` on the way may only lead to a file of that user.

    The rule of fs.protected_symlinks, in any folder: root would else read for that user what only root may. Each part
    is opened from the folder before it, so that no part is exchanged between look and use. A FIFO is opened without
    waiting. Raises OSError as open(2) does, PermissionError with EPERM for such a link.
    """
    foreign: set[int] = set()
    links = 0
    todo = _parts(os.fspath(path))
    folder = os.open("/" if path.is_absolute() else ".", _PLACE)
    try:
        while todo:
            name = todo.pop()
            here = os.open(name, _PLACE, dir_fd=folder)
            state = os.fstat(here)
            if stat.S_ISLNK(state.st_mode):
                try:
                    target = os.readlink("", dir_fd=here)
                finally:
                    os.close(here)
                links += 1
                if links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                foreign |= {state.st_uid} - set(ours)
                if target.startswith("/"):
                    os.close(folder)
                    folder = os.open("/", _PLACE)
                todo += _parts(target)
                continue
            os.close(folder)
            folder = here
        return _opened(folder, foreign, path)
    finally:
        os.close(folder)


def _opened(place: int, links_of: Collection[int], path: Path) -> int:
    """Open what an O_PATH descriptor stands for, if it belongs to the owners of the links that led to it."""
    owner = os.fstat(place).st_uid
    other = next((user for user in links_of if user != owner), None)
    if other is not None:
        raise PermissionError(errno.EPERM, f"a link of user {other} leads to a file of user {owner}", str(path))
    return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


def _parts(path: str) -> list[str]:
    """Return the parts of a path, last first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def sync_folder(folder: Path) -> None:
    """Make renames inside the folder survive a power cut: POSIX syncs a directory entry only with its directory."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, most_bytes: int = READ_MAX_BYTES, *, mine: bool = False) -> bytes:
    """Read a regular file of at most `most_bytes`. With `mine`: no link, and only this user may have written it.

    Raises OSError for anything that is not a regular file (a FIFO would block the caller without end, a device may
    never end) and ValueError for a larger file.
    """
    # O_NONBLOCK lets the open of a FIFO without a writer return; it changes nothing for a regular file.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (os.O_NOFOLLOW if mine else 0)
    with reading(path):
        descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(f"{path} is not a regular file")
        if mine and (state.st_uid != os.geteuid() or state.st_mode & 0o022):
            raise OSError(f"{path} could have been written by another user")
        # Not read(most_bytes + 1) alone: that allocates the whole limit before it reads the first byte.
        data = file.read(min(state.st_size, most_bytes) + 1)
        if len(data) > state.st_size:  # it has grown meanwhile
            data += file.read(most_bytes + 1 - len(data))
    if len(data) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes")
    return data


def read_json(path: Path, most_bytes: int = READ_MAX_BYTES) -> Any:
    """Read a JSON file of ours. Raises OSError, or ValueError as `parse_json` does."""
    return parse_json(read_bounded(path, most_bytes))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of any origin. Raises ValueError for bad JSON, NaN, infinity, 400 digits and too deep nesting."""
    try:
        return json.loads(text, parse_constant=_not_finite, parse_float=_finite, parse_int=_counted)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_foreign_json(text: str | bytes) -> Any:
    """Parse JSON of an engine or server: NaN, 1e400 and 400 digits are None. Raises ValueError as `parse_json`."""
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_finite_or_none, parse_int=_counted_or_none)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _counted(text: str) -> int:
    """Refuse a number of 400 digits, which no float and no figure can hold."""
    return int(text) if len(text) <= _DIGITS else int(_not_finite(text))


def _counted_or_none(text: str) -> int | None:
    return int(text) if len(text) <= _DIGITS else None


def _finite_or_none(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _not_finite(text: str) -> float:
    raise ValueError(f"{text[:40]} is not a JSON number")


def _finite(text: str) -> float:
    """Refuse 1e400, which float() turns into infinity and json.dumps would write as `Infinity`."""
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hex; `on_bytes` gets the size of each chunk read. Raises OSError."""
    import hashlib  # late: loads OpenSSL, and a start hashes nothing

    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if on_bytes:
                on_bytes(count)
    return digest.hexdigest()


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Take the flock of an open file without waiting; return False when another process holds it.

    The kernel releases the lock with the last descriptor, also after SIGKILL. Raises OSError when the file system
    supports no locks (some NFS mounts).
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
