"""Processes of test runs that were killed: found by a mark in their environment, and ended by the next run.

python -m tests.leftovers [PATTERN]     also removes the folder of each file that holds the mark of such a run
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "EDGE_TEST_RUN"  # PID:START of the test run; every child inherits it
_PATIENCE_S = 10.0


def mark() -> None:
    """Have every process that is started from here on name this one as its test run."""
    os.environ[MARK] = f"{os.getpid()}:{began_ticks(os.getpid())}"


def sweep() -> list[int]:
    """End what test runs left that are no more, and all that this has started. Return the pids.

    Processes of other users are left alone where they cannot be read, as are those of runs that still go on.
    """
    ended: list[int] = []
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _left()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended += [pid for pid in left if pid not in ended]
        time.sleep(0.02)
    return ended


def remove_folders(pattern: str) -> None:
    """Remove the folders whose file of this pattern holds the mark of a test run that is no more."""
    for name in glob.glob(pattern):  # noqa: PTH207 (an absolute pattern)
        with suppress(OSError, UnicodeDecodeError):
            if (left := Path(name).read_text().strip()) and not runs(left):
                shutil.rmtree(Path(name).parent, ignore_errors=True)


def began_ticks(pid: int) -> int | None:
    """Return the start since boot, in ticks of 10 ms; with the pid it identifies one process. None without one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def runs(mark: str) -> bool:
    """Whether the test run of this mark goes on. One that this user may not see (hidepid) does."""
    pid, _, ticks = mark.partition(":")
    if not pid.isdigit():
        return False
    began = began_ticks(int(pid))
    return str(began) == ticks if began is not None else _hidden(int(pid))


def _hidden(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return not Path(f"/proc/{pid}").exists()


def _left() -> list[int]:
    """Processes whose test run is no more, and their descendants: these may have an environment of their own."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    ours = _ancestry(os.getpid())
    namespace = Path("/proc/self/ns/pid").readlink()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z":
                continue
            pid, parents[pid] = int(entry.name), int(fields[1])
            values = (entry / "environ").read_bytes().split(b"\0")
            marks = [value[len(MARK) + 1 :].decode() for value in values if value.startswith(f"{MARK}=".encode())]
            # A container's run names its pid as the container sees it.
            if marks and not runs(marks[0]) and (entry / "ns/pid").readlink() == namespace:
                found.add(pid)
    found -= ours
    while more := {pid for pid, parent in parents.items() if parent in found} - found - ours:
        found |= more
    return sorted(found)


def _ancestry(pid: int) -> set[int]:
    """This process and all that it descends from."""
    found: set[int] = set()
    with suppress(OSError):
        while pid > 0:
            found.add(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


if __name__ == "__main__":
    sweep()
    for each in sys.argv[1:]:
        remove_folders(each)
