"""`edgellm up` until the engine runs: standard library only, the application's imports follow while the model loads.

inherited sockets → configuration → lock → bind what is not inherited → plan → spawn → only then edge.daemon.app.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

from edge.board.device_nodes import WAIT_S
from edge.config import Config, load
from edge.daemon import consent
from edge.daemon.lock import Lock, acquire
from edge.daemon.options import given, parse
from edge.daemon.start_timeline import Span
from edge.errors import BugError, DeviceMissingError, EdgeError, EngineMissingError, UnavailableError
from edge.linux import sockets as listen
from edge.linux.procfs import process_started_s
from edge.linux.sd_notify import Notifier
from edge.paths import Folders, folders
from edge.plan.choose import NotDownloadedError
from edge.plan.prepare import Prepared, config_of, prepare, preset_of
from edge.supervisor.policy import hygiene
from edge.supervisor.process import Child, spawn

Options = Mapping[str, Any]


class Claimed(NamedTuple):
    """A run folder that is locked and addresses that listen. `failure` stands in for a configuration."""

    folders: Folders
    config: Config
    failure: EdgeError | None
    lock: Lock
    listeners: listen.Listeners


def up(argv: list[str]) -> int:
    """Run until stopped and return the exit code. Faults before the first spawn raise EdgeError."""
    gc.disable()  # nothing of the launch is garbage, and looking for some costs more than a tenth of its CPU time
    clock = _Clock(process_started_s() or time.monotonic())
    options = parse(argv)
    clock.lap("python")
    notifier = Notifier.take(os.environ)
    notifier.status("planning")
    claimed = _claim(options)
    clock.lap("configure")
    plan = claimed.failure or _plan(claimed, options)
    if claimed.failure is None:
        clock.lap("plan")
    children = _spawn(plan, claimed) if isinstance(plan, Prepared) else {}
    try:
        if isinstance(plan, Prepared):
            clock.lap("spawn")
        spawn_cpu_s = time.process_time() if children else None
        from edge.daemon.app import Launched, run
        from edge.daemon.history import LaunchTimes

        gc.freeze()
        gc.enable()
        launched = Launched(
            folders=claimed.folders,
            config=claimed.config,
            plan=plan,
            lock=claimed.lock,
            listeners=claimed.listeners,
            notifier=notifier,
            children=children,
            flags=given(options),
            as_json=bool(options["json"]),
            times=LaunchTimes(clock.began_s, clock.spans, spawn_cpu_s),
        )
        return run(launched)
    except BaseException:
        _kill(children.values())  # Ctrl-C while importing, or a bug: no engine outlives its supervisor
        raise


class _Clock:
    """Records the phases of the launch as spans that follow each other."""

    def __init__(self, began_s: float) -> None:
        self.spans: list[Span] = []
        self.began_s = self._last_s = began_s

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.spans.append(Span(name, None, self._last_s - self.began_s, now - self.began_s))
        self._last_s = now


def _claim(options: Options) -> Claimed:
    sockets = listen.inherited(os.environ)
    places = folders(os.environ, _state_dir(options))
    config, failure = _configure(options, places, inherited=bool(sockets))
    lock = acquire(places)
    listeners = listen.Listeners(sockets or listen.bind(config.listen), inherited=bool(sockets))
    lock.publish(listeners.urls(tls=bool(config.gateway.tls_cert)))
    return Claimed(places, config, failure, lock, listeners)


def _state_dir(options: Options) -> Path | None:
    return Path(options["state_dir"]) if options["state_dir"] else None


def _configure(options: Options, places: Folders, *, inherited: bool) -> tuple[Config, EdgeError | None]:
    """Behind a socket unit a fault is answered with 503: after an exit each waiting client would start us again."""
    try:
        return load(places, given(options), os.environ), None
    except EdgeError as error:
        if not inherited:
            raise
        return Config(), error


def _plan(claimed: Claimed, options: Options) -> Prepared | EdgeError:
    """Return the plan, or the error to serve in its place. Raises EdgeError where `up` should exit."""
    inherited = claimed.listeners.inherited
    try:
        return _prepare(claimed, options)
    except EdgeError as error:
        # Soon after boot the driver may only be late, so that a start by hand waits too.
        late = isinstance(error, DeviceMissingError) and error.patience_s >= WAIT_S
        if not (inherited or late):
            raise
        return error
    except Exception as error:
        if not inherited:
            raise
        import traceback

        traceback.print_exc()  # a bug of ours is answered with 503 too: each waiting client would start us again
        return BugError(f"the plan could not be made: {error!r}", "please report this, with the journal")


def _prepare(claimed: Claimed, options: Options) -> Prepared:
    """With --yes, or a yes on the terminal, build and fetch what is missing first."""
    state_dir, yes = _state_dir(options), bool(options["yes"])
    config, places, inherited = claimed.config, claimed.folders, claimed.listeners.inherited
    for _ in ("an engine", "models"):
        try:
            return prepare(config, places)
        except EngineMissingError as missing:
            if missing.recipe is None or inherited:
                raise
            consent.build(missing, missing.recipe, state_dir, yes=yes)
        except NotDownloadedError as missing:
            if inherited:
                raise
            consent.fetch(missing.downloads, state_dir, yes=yes)
    return prepare(config, places)


def _spawn(prepared: Prepared, claimed: Claimed) -> dict[str, Child]:
    """Start every preloaded model's engine; on one unified memory they load side by side."""
    children: dict[str, Child] = {}
    for model_id, model in prepared.plan.models.items():
        if not config_of(prepared, model_id).preload:
            continue  # its first request starts it
        plan = model.ladder.plans[model.ladder.chosen]
        try:
            limits = hygiene(preset_of(prepared, model_id))
            children[model_id] = spawn(plan.argv, plan.env, claimed.folders.model_socket(model_id), limits)
        except BaseException as error:
            # Behind a socket unit the supervisor tries once more and reports the reason.
            if not (isinstance(error, UnavailableError) and claimed.listeners.inherited):
                _kill(children.values())
                raise
    return children


def _kill(children: Iterable[Child]) -> None:
    for child in children:
        child.send(SIGKILL)
        child.wait(5)
        child.close()
        child.socket_path.unlink(missing_ok=True)
