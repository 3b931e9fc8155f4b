"""What a launch holds before the application runs: its clock, the engines that it spawned, its lock and sockets.

Imported before the first spawn: nothing with msgspec.
"""

from __future__ import annotations

import time
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

from edge.daemon.lock import Lock, acquire
from edge.daemon.remembered_launch import EngineCommand, RememberedLaunch
from edge.linux.procfs import resident_ratio
from edge.linux.sockets import Listeners, bind
from edge.paths import Folders
from edge.supervisor.process import Child, ProcessLimits, spawn

WARM = 0.9  # of the file in the page cache: nothing is left to prefetch


class Clock:
    """Records the phases of the launch as laps that follow each other: name, start and end since the process began."""

    def __init__(self, began_s: float) -> None:
        self.laps: list[tuple[str, float, float]] = []
        self.began_s = self._last_s = began_s
        self.spawn_cpu_s: float | None = None

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps.append((name, self._last_s - self.began_s, now - self.began_s))
        self._last_s = now

    def spawned(self) -> None:
        self.lap("spawn")
        self.spawn_cpu_s = time.process_time()


class Children(dict[str, Child]):
    """The engines that the launcher spawned, by model id. `resident`: how much of each file was in the page cache."""

    def __init__(self) -> None:
        super().__init__()
        self.resident: dict[str, float | None] = {}
        self._prefetching: list[Any] = []  # processes

    def start(self, model_id: str, command: EngineCommand, socket: Path) -> None:
        """Raises UnavailableError if the engine cannot be executed."""
        nice, oom_score_adj, cpus = command.limits
        limits = ProcessLimits(nice, oom_score_adj, tuple(cpus))
        path, resident = Path(command.files[0]), None
        if command.cold_argv:
            resident = resident_ratio(path)
        is_cold = resident is not None and resident < command.cold_below
        argv = command.cold_argv if is_cold and command.cold_argv else command.argv
        child = self[model_id] = spawn(argv, command.env, socket, limits)
        if not command.cold_argv:  # about 1 ms, in which no engine has come to its weights
            resident = resident_ratio(path)
        self.resident[model_id] = resident
        if command.prefetch_least_bytes is not None and resident is not None and resident < WARM and not is_cold:
            from edge.linux import prefetch

            self._prefetching.append(prefetch.start(command.files, child.pid, command.prefetch_least_bytes))

    def end_prefetch(self) -> None:
        """End the prefetching processes and reap them."""
        for process in self._prefetching:
            process.kill()
            process.wait()
        self._prefetching.clear()

    def kill(self) -> None:
        self.end_prefetch()
        for child in self.values():
            child.send(SIGKILL)
        for child in self.values():
            child.wait(5)
            child.end_rest()
            child.close()
            child.socket_path.unlink(missing_ok=True)
        self.clear()


class Early(NamedTuple):
    """A start whose engines run already, by a remembered launch that the plan has yet to confirm."""

    remembered: RememberedLaunch
    lock: Lock
    listeners: Listeners


def claim(places: Folders, sockets: list[Any], listen: list[str], *, tls: bool) -> tuple[Lock, Listeners]:
    """Lock the run folder and listen. Raises AlreadyRunningError, AddressInUseError, ConfigError, UnavailableError."""
    lock = acquire(places)
    listeners = Listeners(sockets or bind(listen), inherited=bool(sockets))
    lock.publish(listeners.urls(tls=tls))
    return lock, listeners
