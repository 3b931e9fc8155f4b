"""Read the model that is likely to start next into the page cache, while nothing else needs disk or memory.

Its swap then reads memory in place of a disk. What the kernel drops meanwhile is read again at the next look.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from edge.linux import prefetch
from edge.linux.procfs import resident_ratio
from edge.linux.timeouts import in_thread

SOON_S = 900.0  # a 35 GB model takes ten minutes from the SD card of a Jetson (60 MB/s)
_RESIDENT = 0.95  # mincore(2) is asked at 64 places: what is left is read by the engine in no time
_log = logging.getLogger(__name__)


class Sleeper(Struct, frozen=True):
    """A sleeping model. `slept_s`: for how long, None if it was not READY yet; `warm_in_s`: until its start is due.

    Also one that is READY, `slept_s` for how long, whose restart would not find its file in the page cache.
    """

    id: str
    files: tuple[str, ...]
    bytes: int
    slept_s: float | None = None
    warm_in_s: float | None = None


def likely_next(asleep: Iterable[Sleeper]) -> Sleeper | None:
    """Return the model whose `warm_at` is near, else the one that slept last; None where neither is known. Pure."""
    known = [each for each in asleep if each.files]
    soon = [each for each in known if each.warm_in_s is not None and each.warm_in_s <= SOON_S]
    if soon:
        return min(soon, key=lambda each: (each.warm_in_s or 0.0, each.id))
    used = [each for each in known if each.slept_s is not None]
    return min(used, key=lambda each: (each.slept_s or 0.0, each.id), default=None)


class ReadAhead:
    """At most one reader at a time, with the idle class of the disk. A model that is loading ends it."""

    def __init__(self) -> None:
        self.model_id: str | None = None  # the last one that was read
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = 0  # how often it was ended: a start that came while the disk was asked is not read beside

    async def look(self, asleep: Iterable[Sleeper], spare_bytes: int, least_bytes: int) -> None:
        """Begin to read the next model, if the page cache lacks it and has room.

        `spare_bytes`: memory that neither models nor the reserve need; `least_bytes`: MemAvailable at which it stops.
        """
        if self.running:
            return
        found, ends = likely_next(asleep), self._ends
        if found is None or found.bytes > spare_bytes:
            return
        # A disk that hangs holds open(2): in a thread, so that it does not hold the event loop.
        if await in_thread(partial(_in_cache, found.files), None) or ends != self._ends:
            return
        self.model_id = found.id
        _log.debug("%s is read ahead", found.id)
        with suppress(OSError):
            self._process = prefetch.start(found.files, os.getpid(), least_bytes, idle=True)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """End the reader. What it has read stays in the page cache as long as the kernel has room."""
        self._ends += 1
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
        if process is not None:
            process.wait()


def _in_cache(files: Sequence[str]) -> bool:
    return all((resident_ratio(Path(file)) or 0.0) >= _RESIDENT for file in files)
