"""`doctor --fix`: makes our folders, closes our files, removes our dead sockets; nothing else, nothing of others."""

from __future__ import annotations

import os
import pwd

from edge.doctor.facts import OurFile

SERVICE_USER = "edgellm"


def apply(files: tuple[OurFile, ...]) -> tuple[str, ...]:
    """What was done, a sentence each. What could not be done is said the same way."""
    return tuple(_one(file) for file in files)


def _one(file: OurFile) -> str:
    try:
        if file.kind == "folder":
            file.path.mkdir(parents=True, exist_ok=True)
            file.path.chmod(file.mode)
            _hand_over(file)
            return f"made {file.path}"
        if file.kind == "mode":
            file.path.chmod(file.mode)
            return f"closed {file.path} (mode {file.mode:o})"
        if file.path.is_socket():  # still one: nobody has put a file in its place since we looked
            file.path.unlink()
        return f"removed the dead socket {file.path}"
    except OSError as error:
        return f"could not change {file.path}: {error.strerror}"


def _hand_over(file: OurFile) -> None:
    """A folder made by root belongs to the service's user where there is one, or the service could not use it."""
    if os.geteuid() != 0:
        return
    try:
        entry = pwd.getpwnam(SERVICE_USER)
    except KeyError:
        return
    os.chown(file.path, entry.pw_uid, entry.pw_gid)
