"""`edgellm up` until the engine runs. What is imported here costs time before every spawn: nothing with msgspec.

With a remembered launch: sockets → compare → lock → bind → spawn, and only then the configuration and the plan, which
may replace the engine. Without: sockets → configuration → lock → bind → plan → spawn. Then edge.daemon.app.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

from edge.daemon import remembered_launch
from edge.daemon.lock import Lock, acquire
from edge.daemon.remembered_launch import RememberedLaunch
from edge.errors import UnavailableError
from edge.linux.procfs import limit_malloc_arenas, process_started_s, resident_ratio
from edge.linux.sd_notify import Notifier
from edge.linux.slow_reads import ReadHangs, answer_of
from edge.linux.sockets import Listeners, bind, inherited
from edge.paths import Folders, folders
from edge.supervisor.process import Child, ProcessLimits, spawn

# Some hundred stat(2) of an SD card take a fraction of it; a plan is the answer to what is slower.
COMPARE_S = 5.0
WARM = 0.9  # of the file in the page cache: nothing is left to prefetch
# How long a thread keeps the interpreter while another waits for it. Python's 5 ms, for a first sample of the sensors,
# came twice between an engine that is ready and the request that waits for it.
SWITCH_S = 0.001


def up(argv: list[str]) -> int:
    """Run until stopped and return the exit code. Faults before the first spawn raise EdgeError."""
    limit_malloc_arenas()
    clock = Clock(process_started_s() or time.monotonic())
    notifier = Notifier.take(os.environ)
    children = Children()
    try:
        sockets = inherited(os.environ)
        clock.lap("python")
        early = _spawn_remembered(argv, folders(os.environ, _state_dir(argv)), sockets, children, clock)
        notifier.status("loading" if early else "planning")
        with without_extensions():
            import msgspec  # noqa: F401
        from edge.daemon.options import parse
        from edge.daemon.planning import Request, launch

        options = parse(argv)
        places = folders(os.environ, Path(options["state_dir"]) if options["state_dir"] else None)
        launched = launch(Request(argv, options, places, sockets), early, children, clock, notifier)
        with without_authorities():
            from edge.daemon.app import run

        gc.freeze()
        gc.enable()
        sys.setswitchinterval(SWITCH_S)
        return run(launched)
    except BaseException:
        children.kill()  # Ctrl-C while importing, a plan that fails, or a bug: no engine outlives its supervisor
        raise


@contextmanager
def without_extensions() -> Iterator[None]:
    """Keep msgspec from importing typing_extensions, which imports inspect: 8 to 10 ms of CPU time before the spawn.

    It takes what it needs from typing then (msgspec/_utils.py); a later import finds the package as ever.
    """
    name = "typing_extensions"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def without_authorities() -> Iterator[None]:
    """Keep OpenSSL from reading the system's certificate authorities, which `import aiohttp` does: 45 ms of CPU time.

    The gateway's connections to engines are unix sockets, and its server has a certificate of its own.
    """
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, os.devnull))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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

    def start(self, model_id: str, command: Command, socket: Path) -> None:
        """Raises UnavailableError if the engine cannot be executed."""
        path, resident = Path(command.files[0]), None
        if command.cold_argv:
            resident = resident_ratio(path)
        is_cold = resident is not None and resident < command.cold_below
        argv = command.cold_argv if is_cold else command.argv
        child = self[model_id] = spawn(argv, command.env, socket, command.limits)
        if not command.cold_argv:  # 1 to 3 ms, in which no engine has come to its weights
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


class Command(NamedTuple):
    """How an engine is executed. `files`: of its model, in the order of their reading.

    `prefetch_least_bytes`: they are read ahead of it while so much memory is available; None: they are not.
    `cold_argv`: in place of `argv` while less than `cold_below` (0…1) of them is in the page cache; empty: never.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    limits: ProcessLimits
    files: Sequence[str]
    prefetch_least_bytes: int | None
    cold_argv: Sequence[str] = ()
    cold_below: float = 0.0


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


def _state_dir(argv: list[str]) -> Path | None:
    """Return the value of --state-dir without argparse, whose import costs 5 ms.

    A misreading finds no record, or one of a start with exactly this command line, whose folder is the right one.
    """
    for number, word in enumerate(argv):
        if word == "--state-dir" and number + 1 < len(argv):
            return Path(argv[number + 1])
        if word.startswith("--state-dir="):
            return Path(word.removeprefix("--state-dir="))
    return None


def _remembered(argv: list[str], places: Folders) -> RememberedLaunch | None:
    """Return the record of the last launch if everything is as it was. Blocking."""
    record = remembered_launch.read_record(remembered_launch.record_path(places))
    return record if record is not None and remembered_launch.why_not(record, argv, os.environ) is None else None


def _spawn_remembered(
    argv: list[str], places: Folders, sockets: list[Any], children: Children, clock: Clock
) -> Early | None:
    """Spawn the engines of the remembered launch; None where there is none, or it is not this machine's any more."""
    try:
        record = answer_of(partial(_remembered, argv, places), COMPARE_S, COMPARE_S)
    except ReadHangs:
        return None  # a driver or a disk does not answer: the plan finds out which
    if record is None:
        return None
    lock, listeners = claim(places, sockets, record.listen, tls=record.tls)
    clock.lap("compare")
    try:
        for model_id, model in record.models.items():
            nice, oom_score_adj, cpus = model.limits
            limits = ProcessLimits(nice, oom_score_adj, tuple(cpus))
            command = Command(
                model.argv,
                model.env,
                limits,
                model.files,
                model.prefetch_least_bytes,
                model.cold_argv or (),
                model.cold_below,
            )
            children.start(model_id, command, places.model_socket(model_id))
    except UnavailableError:
        children.kill()  # the plan finds out what is wrong with the engine
    clock.spawned()
    return Early(record, lock, listeners)
