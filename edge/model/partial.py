"""`models/.partial/`: work that is not a model yet. One folder a job; it becomes a model by one rename, or is swept.

    .partial/<key>/lock       held by flock while somebody works on it
                   job.json   what it is: {"kind": "pull", "source": ...}
                   payload/   what will be the model's folder
                   work/      scraps

A process that is killed leaves its folder without the lock: the next job resumes the same pull or removes the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from edge.errors import BadDataError, TemporaryError
from edge.model import receipt
from edge.model.receipt import Receipt
from edge.model.scan import PARTIAL, size_of


@dataclass(frozen=True, slots=True)
class Job:
    """One locked folder under `.partial/`, and the folder its payload becomes."""

    folder: Path
    final: Path

    @property
    def payload(self) -> Path:
        return self.folder / "payload"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def set_aside(self, path: Path, name: str) -> None:
        """Keeps a file that must not be used where it can be looked at until the next job sweeps it away."""
        rejected = self.folder / "rejected"
        rejected.mkdir(exist_ok=True)
        path.replace(rejected / name)

    def install(self, what: Receipt) -> Path:
        """Makes the payload a model: everything on disk first, then one rename. Returns the model's folder."""
        write_json(self.payload / receipt.FILE_NAME, what.to_json())
        for path in sorted(self.payload.rglob("*"), reverse=True):
            sync(path)
        sync(self.payload)
        self.payload.rename(self.final)
        sync(self.final.parent)
        return self.final


@contextlib.contextmanager
def job(models_dir: Path, name: str, identity: str, kind: str, shown: str | None = None) -> Iterator[Job]:
    """A job's folder, locked. It is removed when the work was done or cannot go on; kept when the next try can resume.

    `name` and `shown` are for people, `identity` (never written) tells one job from another. Raises TemporaryError
    when somebody else works on it.
    """
    sweep(models_dir)
    key = f"{name}-{sha256(identity.encode()).hexdigest()[:8]}"
    folder = models_dir / PARTIAL / key
    lock = None
    for _ in range(3):  # another job's sweep may remove the folder between these two lines
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        if lock is not None:
            break
    else:
        raise TemporaryError(f"somebody else is at work on {name}", "wait for it, or see: edgellm model list")
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
        elif kind != "pull" or isinstance(error, BadDataError) or not _holds_work(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _holds_work(folder: Path) -> bool:
    """Bytes that a next try need not fetch again."""
    files = [*folder.glob("payload/**/*"), *folder.glob("work/**/*.part"), *folder.glob("work/**/*.whl")]
    return any(path.is_file() and path.stat().st_size for path in files)


class Resumable(TemporaryError):
    """The work broke off, but what is there is good and the next try goes on from it."""


def sweep(models_dir: Path) -> list[str]:
    """Removes what nobody works on and nothing can resume. Returns the names of what went."""
    gone = []
    for folder in _folders(models_dir):
        lock = _lock(folder)
        if lock is None:
            continue
        try:
            if kind_of(folder) != "pull":
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder.name)
        finally:
            os.close(lock)
    return gone


@dataclass(frozen=True, slots=True)
class Pending:
    """Work that is going on or was broken off, for lists."""

    source: str
    kind: str
    bytes: int
    active: bool


def jobs(models_dir: Path) -> list[Pending]:
    """What lies in `.partial/` and says what it is."""
    found = []
    for folder in _folders(models_dir):
        source, kind = job_field(folder, "source"), kind_of(folder)
        if source and kind:
            lock = _lock(folder)
            if lock is not None:
                os.close(lock)
            sizes = [size_of(path) or 0 for path in folder.rglob("*") if path.is_file()]
            found.append(Pending(source, kind, sum(sizes), active=lock is None))
    return found


def kind_of(folder: Path) -> str | None:
    """None for a folder whose job was killed before it could say what it is."""
    return job_field(folder, "kind")


def job_field(folder: Path, key: str) -> str | None:
    try:
        value = json.loads((folder / "job.json").read_bytes()).get(key)
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None


def _folders(models_dir: Path) -> list[Path]:
    try:
        return sorted(path for path in (models_dir / PARTIAL).iterdir() if path.is_dir())
    except OSError:
        return []


def _lock(folder: Path) -> int | None:
    """An open descriptor that holds the folder's lock; None when another process has it (or removed the folder)."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The one who held it may have removed the folder in the meantime: this lock would guard nothing.
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def write_json(path: Path, data: object) -> None:
    """Atomic: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
