"""Jobs in `models/.partial/`: one folder each, which becomes a model by one rename or is removed.

    .partial/<key>/lock       held by flock while a process works on it
                   job.json   what it is: {"kind": "pull", "source": ...}
                   payload/   what will be the model's folder
                   work/      scraps

A process that is killed leaves its folder without the lock: the next job resumes the same pull or removes the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge.errors import BadDataError, TemporaryError, UnavailableError
from edge.linux.files import naming, read_json, sync_folder, try_lock, write_json
from edge.models import receipt
from edge.models.receipt import Receipt
from edge.models.scan import PARTIAL, size_of


class Job(Struct, frozen=True):
    """A locked folder under `.partial/`, and the folder that its payload becomes."""

    folder: Path
    final: Path

    @property
    def payload(self) -> Path:
        return self.folder / "payload"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def present(self, names: Iterable[str]) -> bool:
        """Return whether the model is in the store with these files, and none of them was damaged since."""
        files = tuple(names)
        whole = self.final.is_dir() and receipt.is_whole(self.final, files)
        if whole:
            self._renew(files)
        return whole

    def _renew(self, names: Iterable[str]) -> None:
        """Note how files that were found whole are now: those that were linked or moved need not be read again."""
        note, whole = receipt.read(self.final), frozenset(names)
        path = self.final / receipt.FILE_NAME
        with suppress(OSError):
            if note is None or path.stat().st_uid != os.geteuid():
                return
            files = tuple(file.arrived(self.final / file.path) if file.path in whole else file for file in note.files)
            if files != note.files:
                write_json(path, replace(note, files=files).to_json())

    def close(self) -> None:
        """Let no other user look at what root copies before it is judged; `install` opens the folder again."""
        state = self.payload.stat()
        if state.st_uid == os.geteuid() == 0:
            self.payload.chmod(stat.S_IMODE(state.st_mode) & ~0o077)

    def set_aside(self, path: Path, name: str) -> None:
        """Move a bad file aside, for inspection until the next job removes it."""
        rejected = self.folder / "rejected"
        rejected.mkdir(exist_ok=True)
        path.replace(rejected / name)

    def install(self, what: Receipt) -> Path:
        """Sync the payload and rename it to the model's folder, which is returned."""
        for path in (self.payload, *self.payload.rglob("*")):
            _open_for_the_service(path)
        files = tuple(file.arrived(self.payload / file.path) for file in what.files)
        write_json(self.payload / receipt.FILE_NAME, replace(what, files=files).to_json())
        # Reversed: a folder is synced after the files in it, so that no name points at data that is not on disk.
        for path in sorted(self.payload.rglob("*"), reverse=True):
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self.payload)
        if self.final.exists():  # damaged, or without its projector
            self.final.rename(self.work / "former")
        self.payload.rename(self.final)
        sync_folder(self.final.parent)
        return self.final


def _open_for_the_service(path: Path) -> None:
    """Let every user read what root made, whatever its umask: the service's user serves what root fetches."""
    state = path.stat()
    mode = stat.S_IMODE(state.st_mode) | (0o755 if path.is_dir() else 0o644)
    if state.st_uid == os.geteuid() == 0 and mode != stat.S_IMODE(state.st_mode):
        path.chmod(mode)


@contextlib.contextmanager
def job(models_dir: Path, name: str, identity: str, kind: str, shown: str | None = None) -> Iterator[Job]:
    """Lock a job's folder. It is removed when the work is done or cannot be resumed, and kept when it can.

    `name` and `shown` are for messages, `identity` (never written) is the key of the job. Raises TemporaryError when
    another process works on it.
    """
    sweep(models_dir)
    # NAME_MAX is 255 bytes, and names of models may be as long.
    short = name.encode()[:100].decode(errors="ignore")
    key = f"{short}-{sha256(identity.encode(errors='surrogateescape')).hexdigest()[:8]}"
    folder = models_dir / PARTIAL / key
    lock = None
    for _ in range(3):  # another job's sweep may remove the folder between these two lines
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = _lock(folder)
        except OSError as error:  # ENOLCK of some NFS mounts
            hint = "keep models on a local disk, or mount NFS with its lock service"
            raise UnavailableError(f"{folder} cannot be locked: {error.strerror}", hint) from error
        if lock is not None:
            break
    else:
        raise TemporaryError(f"another process works on {name}", "wait for it, or see: edgellm model list")
    try:
        one = Job(folder, models_dir / key)
        write_json(folder / "job.json", {"schema": 1, "kind": kind, "source": shown or identity})
        one.payload.mkdir(exist_ok=True)
        one.work.mkdir(exist_ok=True)
        yield one
        shutil.rmtree(folder, ignore_errors=True)
    except Exception as error:
        if (folder / "rejected").is_dir():
            write_json(folder / "job.json", {"schema": 1, "kind": "rejected", "source": shown or identity})
        # Only a pull can go on: bytes of a bad hash are not worth keeping, nor is a half conversion.
        elif kind != "pull" or isinstance(error, BadDataError) or not _holds_work(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _holds_work(folder: Path) -> bool:
    """Return whether the folder holds bytes that the next try need not fetch again."""
    files = [*folder.glob("payload/**/*"), *folder.glob("work/**/*.part"), *folder.glob("work/**/*.whl")]
    return any(path.is_file() and path.stat().st_size for path in files)


class ResumableError(TemporaryError):
    """The work was interrupted; its bytes are good and the next try continues from them."""


def sweep(models_dir: Path) -> list[str]:
    """Remove unlocked jobs that cannot be resumed. Return their names."""
    gone = []
    for folder in _folders(models_dir):
        lock = _lock_or_none(folder)
        if lock is None:
            continue
        try:
            if _field(folder, "kind") != "pull":
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder.name)
        finally:
            os.close(lock)
    return gone


class Pending(Struct, frozen=True):
    """A job that runs or was interrupted, for lists."""

    source: str
    kind: str
    bytes: int
    active: bool


def jobs(models_dir: Path) -> list[Pending]:
    """List the jobs in `.partial/`."""
    found = []
    for folder in _folders(models_dir):
        source, kind = _field(folder, "source"), _field(folder, "kind")
        if source and kind:
            lock = _lock_or_none(folder)
            if lock is not None:
                os.close(lock)
            sizes = [size_of(path) or 0 for path in folder.rglob("*") if path.is_file()]
            found.append(Pending(source, kind, sum(sizes), active=lock is None))
    return found


def _field(folder: Path, key: str) -> str | None:
    """Return a value of job.json; None if the job was killed before it was written."""
    try:
        value = read_json(folder / "job.json").get(key)
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None


def _folders(models_dir: Path) -> list[Path]:
    try:
        return sorted(path for path in (models_dir / PARTIAL).iterdir() if path.is_dir())
    except OSError:
        return []


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock, None if another process has it or removed the folder.

    Raises OSError where the file system has no locks.
    """
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        # The former holder may have removed the folder in the meantime: this lock would guard nothing.
        if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _lock_or_none(folder: Path) -> int | None:
    try:
        return _lock(folder)
    except OSError:
        return None
