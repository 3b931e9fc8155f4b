"""`doctor --fix`: makes our folders, closes our files, removes our dead sockets; nothing else, nothing of others."""

from __future__ import annotations

import fcntl
from pathlib import Path

from edge.doctor.facts import OurFile


def apply(files: tuple[OurFile, ...]) -> tuple[str, ...]:
    """What was done, a sentence each. What could not be done is said the same way."""
    return tuple(_one(file) for file in files)


def _one(file: OurFile) -> str:
    try:
        if file.kind == "folder":
            file.path.mkdir(parents=True, exist_ok=True)
            file.path.chmod(file.mode)
            return f"made {file.path}"
        if file.kind == "mode":
            file.path.chmod(file.mode)
            return f"closed {file.path} (mode {file.mode:o})"
        return _remove_socket(file.path)
    except OSError as error:
        return f"could not change {file.path}: {error.strerror}"


def _remove_socket(path: Path) -> str:
    """Under the instance's lock: an edgellm that starts just now keeps the socket it has just made."""
    with (path.parent / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return f"left {path}: edgellm has started"
        if path.is_socket():  # still one: nobody has put a file in its place since we looked
            path.unlink()
    return f"removed the dead socket {path}"
