"""Give a child process a control group (cgroup v2) of its own, below that of this process where it was delegated.

Standard library only: the first engine is spawned before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from itertools import count
from pathlib import Path

# The unified hierarchy; beside v1 controllers (JetPack 5) systemd mounts it one folder deeper.
MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
PREFIX = "edgellm-engine-"
LOOK_S = 0.02
_numbers = count(1)


class ControlGroup:
    """A folder of cgroup v2 that this process made: whatever runs in it is the child, or was started by it.

    It has no controllers: CPU time and memory are counted in the group above it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open_procs(self) -> int:
        """Open cgroup.procs, to which a process writes `0` to enter. Raises OSError."""
        return os.open(self.folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def pids(self) -> list[int]:
        """Return its processes without zombies; 0, a process of another pid namespace, is left out."""
        try:
            words = (self.folder / "cgroup.procs").read_text().split()
        except OSError:
            return []
        return [int(word) for word in words if word != "0"]

    def kill(self) -> None:
        """Send SIGKILL to all of it, new forks included; before Linux 5.14 (no cgroup.kill) to those listed."""
        try:
            (self.folder / "cgroup.kill").write_text("1")
        except OSError:
            for pid in self.pids():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self, patience_s: float = 0.0) -> bool:
        """Remove the folder once it is empty, waiting up to `patience_s`. Return whether it is gone."""
        end_s = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            if not self.folder.exists():
                return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(LOOK_S)


def create(proc: Path = Path("/proc")) -> ControlGroup | None:
    """Make a group below our own; None where that is not delegated to this process or cgroup v2 is missing."""
    parent = delegated(proc)
    if parent is None:
        return None
    # A supervisor that was killed left its group; a thousand of them would slow systemd down.
    _remove_empty(parent)
    # mkdir decides: a name that is taken belongs to a process with the same pid in another namespace.
    for number in _numbers:
        folder = parent / f"{PREFIX}{os.getpid()}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # of a former process with this pid
            continue
        except OSError:
            return None
        return ControlGroup(folder)
    return None


def delegated(proc: Path = Path("/proc"), mounts: tuple[Path, ...] = MOUNTS) -> Path | None:
    """Return our own group's folder if systemd handed it over (`Delegate=yes`), else None.

    systemd then makes the unit's user its owner, and marks it with an extended attribute, which root needs: root may
    write to every group, but only a delegated one is not systemd's alone (systemd's CGROUP_DELEGATION.md).
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = next((line[3:] for line in lines if line.startswith("0::")), "")
    for mount in mounts:
        folder = mount / own.lstrip("/")
        if not (folder / "cgroup.procs").exists():
            continue
        ours = folder.stat().st_uid == os.getuid() if os.getuid() else _is_marked(folder)
        # A sandbox may show the hierarchy read-only (ProtectControlGroups=).
        return folder if ours and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK) else None
    return None


def _is_marked(folder: Path) -> bool:
    for name in ("trusted.delegate", "user.delegate"):  # the second since systemd 251
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _remove_empty(parent: Path) -> None:
    """Remove groups that a killed supervisor left; the kernel refuses to remove one that holds a process."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                folder.rmdir()
