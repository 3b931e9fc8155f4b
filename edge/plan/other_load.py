"""Lower the engine's threads by the cores that other processes keep busy, as telemetry saw it at earlier starts.

Engine threads wait for each other several times a layer: one that shares its core holds up all. On two cores beside one
busy loop two threads take 1.01 s for 64 tokens of a 0.1 GB model, and one thread 0.71 s (docs/numbers.md).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

from edge.linux.files import read_json, write_json
from edge.linux.slow_reads import ReadHangs, answer_of
from edge.paths import Folders

SCHEMA = 1
READ_S = 1.0  # the gateway opens without the file of a disk that hangs
WINDOW = 300  # samples without a request: five minutes at one a second, so that a build or an update counts for little
# A load between two whole numbers would change the plan, and with it void the remembered launch, at every other start.
HYSTERESIS = 0.75


def load_path(folders: Folders) -> Path:
    """Return the file of the busy cores: an input of every plan, so that a change of it plans anew."""
    return folders.state / "other_load.json"  # the service may not write to its data folder


def read_busy_cores(path: Path) -> int:
    """Return the cores that others kept busy; 0 from a missing, damaged or newer file."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = read_json(path)
        if document["schema"] == SCHEMA:
            return max(0, int(document["busy_cores"]))
    return 0


def keep_busy_cores(path: Path, cores: int) -> bool:
    """Write the cores that others keep busy; return whether the disk allowed it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"schema": SCHEMA, "busy_cores": cores})
    except OSError:
        return False
    return True


def free_cores(cores: int, busy: int) -> int:
    """Return for how many cores the engine gets a thread.

    Where others keep all of them busy every thread shares its core anyway, and fewer threads only get a smaller share:
    beside two busy loops on two cores one thread takes 1.47 s, two take 1.04 s.
    """
    return cores - busy if busy < cores else cores


class LoadWatch:
    """A record of the CPU load while no request is open. `cpus`: how many are busy at a load ratio of 1."""

    def __init__(self, path: Path, cpus: int) -> None:
        self._cpus = cpus
        self._busy = 0
        with suppress(ReadHangs):
            self._busy = answer_of(partial(read_busy_cores, path), READ_S, READ_S)
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def add(self, load_ratio: float | None) -> int | None:
        """Take one sample of all CPUs; return the number of busy cores if it changed, for `keep_busy_cores`."""
        if load_ratio is None:
            return None
        self._seen.append(load_ratio * self._cpus)
        if len(self._seen) < WINDOW:
            return None
        cores = sorted(self._seen)[WINDOW // 2]  # the median; importing statistics costs 5 ms before every spawn
        self._seen.clear()
        if abs(cores - self._busy) < HYSTERESIS:
            return None
        self._busy = round(cores)
        return self._busy
