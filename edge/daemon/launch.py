"""`edgellm up` until the engine runs. What is imported here costs time before every spawn: nothing with msgspec.

With a remembered launch: sockets → compare → lock → bind → spawn, and only then the configuration and the plan, which
may replace the engine. Without: sockets → configuration → lock → bind → plan → spawn. Then edge.daemon.app.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from edge.daemon import remembered_launch
from edge.daemon.children import Children, Clock, Early, claim
from edge.daemon.remembered_launch import RememberedLaunch
from edge.errors import UnavailableError
from edge.linux.procfs import limit_malloc_arenas, process_started_s
from edge.linux.sd_notify import Notifier
from edge.linux.slow_reads import ReadHangs, answer_of
from edge.linux.sockets import inherited
from edge.paths import Folders, folders

# Some hundred stat(2) of an SD card take a fraction of it; a plan is the answer to what is slower.
COMPARE_S = 5.0
# How long a thread keeps the interpreter while another waits for it. Python's 5 ms, for a first sample of the sensors,
# came twice between an engine that is ready and the request that waits for it.
SWITCH_S = 0.001


def up(argv: list[str]) -> int:
    """Run until stopped and return the exit code. Faults before the first spawn raise EdgeError."""
    limit_malloc_arenas()
    # A line to a terminal with `stty tostop` would stop `up &` and with it every client (termios(3), TOSTOP).
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
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
        without_client()
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


def without_client() -> None:
    """Make `import aiohttp` leave out its HTTP client: 25 ms of CPU time, and 45 ms for certificate authorities.

    The server is aiohttp.web, and engines are asked by supervisor/engine_connection.py. Whatever asks the package for
    another name than a module gets the whole of it.
    """
    from importlib.util import find_spec, module_from_spec

    spec = None if "aiohttp" in sys.modules else find_spec("aiohttp")
    if spec is None or spec.loader is None:
        return
    loader, package = spec.loader, module_from_spec(spec)

    def attribute(name: str) -> Any:
        if find_spec(f"aiohttp.{name}") is not None:
            raise AttributeError(name)  # the import of the module follows
        loader.exec_module(package)
        return getattr(package, name)

    # The version is part of two headers that aiohttp would send by itself, and that edge sends otherwise.
    vars(package).update(__version__="", __getattr__=attribute)
    sys.modules["aiohttp"] = package


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
        for model_id, command in record.models.items():
            children.start(model_id, command, places.model_socket(model_id))
    except UnavailableError:
        children.kill()  # the plan finds out what is wrong with the engine
    clock.spawned()
    return Early(record, lock, listeners)
