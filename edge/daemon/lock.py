"""One edgellm per run folder: a lock that the kernel releases with the process, holding its pid and addresses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import NamedTuple

from edge.errors import AlreadyRunningError, UnavailableError
from edge.linux.files import private_dir, read_json
from edge.paths import Folders, system_folders


class Holder(NamedTuple):
    """The process that holds a run folder, as written in its lock file."""

    pid: int
    urls: tuple[str, ...]


class Lock:
    """A flock held until the process ends. The file stays: removing it would race with the next holder."""

    def __init__(self, descriptor: int, folder: Path) -> None:
        self._descriptor = descriptor
        self._folder = folder

    def publish(self, urls: list[str]) -> None:
        """Write the pid and the addresses, for a second `up` and for the CLI. Raises UnavailableError (a full disk)."""
        text = json.dumps({"schema": 1, "pid": os.getpid(), "urls": urls}).encode()
        try:
            # In place: a rename would leave readers and the next holder with locks on different files.
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def release(self) -> None:
        os.close(self._descriptor)


def acquire(folders: Folders) -> Lock:
    """Lock the run folder. Raises AlreadyRunningError (pid and URL) or UnavailableError (the folder is unusable)."""
    _refuse_folder_of_the_service(folders)
    try:
        private_dir(folders.run)
        private_dir(folders.instance_run)
        # O_NOFOLLOW: a link in a folder that others write to would have root truncate the file behind it.
        descriptor = os.open(folders.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise _unusable(folders.instance_run, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        holder = read_holder(folders.lock)
        where = f" (pid {holder.pid}) at {', '.join(holder.urls)}" if holder else ""
        hint = "`edgellm status` shows it, `edgellm stop` ends it; --state-dir DIR runs another beside it"
        raise AlreadyRunningError(f"edgellm is already running{where}", hint) from error
    except OSError as error:  # ENOLCK of some NFS mounts
        os.close(descriptor)
        raise _unusable(folders.instance_run, error) from error
    lock = Lock(descriptor, folders.instance_run)
    try:
        lock.publish([])
    except UnavailableError:
        lock.release()
        raise
    return lock


def _unusable(folder: Path, error: OSError) -> UnavailableError:
    hint = "give a folder you own with --state-dir DIR"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        import shlex  # late: nothing is quoted on the way to the first child

        hint = f"`df -h {shlex.quote(str(folder))}` shows its disk; free some space, or use --state-dir DIR"
    return UnavailableError(f"cannot use the run folder {folder}: {error.strerror}", hint)


def _refuse_folder_of_the_service(folders: Folders) -> None:
    """Raise UnavailableError where root would write to the state folder of the service's user, who may plant links."""
    if os.geteuid() != 0 or folders.state != system_folders().state:
        return
    try:
        owner = folders.state.lstat().st_uid
    except OSError:
        return
    if owner != 0:
        hint = "`sudo systemctl start edgellm`, or give a folder of root's with --state-dir DIR"
        raise UnavailableError(f"{folders.state} belongs to the service's user: root does not work in it", hint)


def read_holder(lock: Path) -> Holder | None:
    """Return the holder named in a lock file; it is current only while the file is locked (`held`)."""
    try:
        record = read_json(lock)
        return Holder(int(record["pid"]), tuple(record["urls"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def held(lock: Path) -> bool:
    """Return whether a live process holds the lock. Read access is enough, so a service's group can ask."""
    try:
        # O_NONBLOCK: a FIFO in its place would hold up every command.
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A shared lock, so that two commands that ask at once do not see each other as the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks, where no edgellm starts
        return False
    finally:
        os.close(descriptor)
    return False
