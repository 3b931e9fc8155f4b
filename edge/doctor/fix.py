"""`edgellm doctor --fix`: create edgellm's folders, tighten modes and remove stale sockets; touch nothing else."""

from __future__ import annotations

import fcntl
from pathlib import Path

from edge.doctor.facts import OwnFile


def apply(files: tuple[OwnFile, ...]) -> tuple[str, ...]:
    """Repair each file and return one sentence per file, also for what failed."""
    return tuple(_one(file) for file in files)


def _one(file: OwnFile) -> str:
    try:
        if file.kind == "folder":
            file.path.mkdir(parents=True, exist_ok=True)
            file.path.chmod(file.mode)
            return f"created {file.path}"
        if file.kind == "mode":
            file.path.chmod(file.mode)
            return f"set the mode of {file.path} to {file.mode:o}"
        return _remove_socket(file.path)
    except OSError as error:
        return f"could not change {file.path}: {error.strerror}"


def _remove_socket(path: Path) -> str:
    """Remove a stale socket under the instance's lock, so that an instance that is starting keeps its new socket."""
    with (path.parent / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return f"kept {path}: edgellm has started"
        if path.is_socket():  # a file may have taken its place since the check
            path.unlink()
    return f"removed the stale socket {path}"
