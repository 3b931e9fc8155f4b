"""`edgellm up`: the child first, the imports later. Standard library only until the engine is running.

inherited sockets → configuration → lock → bind what is not inherited → plan → spawn → only then edge.app.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from signal import SIGKILL
from typing import Any

from edge import consent, listen
from edge.coldstart.journal import process_began_s
from edge.coldstart.timeline import Span
from edge.config import Config, load
from edge.errors import BugError, DeviceMissingError, EdgeError, EngineMissingError, UnavailableError
from edge.folders import Folders, folders
from edge.handover import Launch
from edge.instance import acquire
from edge.options import read
from edge.plan.chosen import fetch_first
from edge.prepare import Prepared, config_of, prepare, wishes_of
from edge.supervisor.child import spawn
from edge.supervisor.devices import WAIT_S
from edge.supervisor.hygiene import hygiene
from edge.supervisor.notify import Notifier

Options = Mapping[str, Any]


def up(argv: list[str]) -> int:
    """Runs until it is stopped. Returns the exit code; faults before the first spawn raise EdgeError."""
    gc.disable()  # nothing of the launch is garbage; looking for some costs more than a tenth of it
    began_s = process_began_s() or time.monotonic()
    clock = _Clock(began_s)
    options = parse(argv)
    launch = _take_sockets(options, began_s, clock)
    try:
        _plan(launch, options, clock)
        _spawn(launch, clock)
        launch.spans = clock.spans
        from edge.app import run

        gc.freeze()
        gc.enable()
        return run(launch)
    except BaseException:
        # Ctrl-C while importing, or a bug: nothing may stay behind.
        for child in launch.children.values():
            child.send(SIGKILL)
            child.wait(5)
            child.close()
            child.socket_path.unlink(missing_ok=True)
        raise


def parse(argv: list[str]) -> Options:
    """By `Option.dest`. Raises UsageError; --help exits."""
    options = read(argv)
    if options is None:
        from edge.usage import explain

        options = explain(argv)
    return options


def given(options: Options) -> Options:
    """Only what was on the command line."""
    return {name: value for name, value in options.items() if value not in (None, False, [])}


class _Clock:
    """Names the parts of the launch as they pass."""

    def __init__(self, began_s: float) -> None:
        self.spans: list[Span] = []
        self._began_s = self._last_s = began_s

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.spans.append(Span(name, None, self._last_s - self._began_s, now - self._began_s))
        self._last_s = now


def _take_sockets(options: Options, began_s: float, clock: _Clock) -> Launch:
    clock.lap("python")
    notifier = Notifier.take(os.environ)
    notifier.status("planning")
    sockets = listen.inherited(os.environ)
    places = folders(os.environ, Path(options["state_dir"]) if options["state_dir"] else None)
    config, failure = _configure(options, places, inherited=bool(sockets))
    lock = acquire(places)
    inherited = bool(sockets)
    if not inherited:
        sockets = listen.bind(config.listen)
    as_json = bool(options["json"])
    launch = Launch(places, config, lock, sockets, inherited, began_s, as_json, failure=failure, notifier=notifier)
    lock.tell(launch.urls)
    clock.lap("configure")
    launch.given = given(options)
    return launch


def _configure(options: Options, places: Folders, *, inherited: bool) -> tuple[Config, EdgeError | None]:
    """Behind a socket unit a fault is answered, not exited with: each waiting client would start us again."""
    try:
        return load(places, given(options), os.environ), None
    except EdgeError as error:
        if not inherited:
            raise
        return Config(), error


def _plan(launch: Launch, options: Options, clock: _Clock) -> None:
    if launch.failure is not None:
        return
    try:
        launch.prepared = _prepared(launch, options)
    except EdgeError as error:
        late = isinstance(error, DeviceMissingError) and error.patience_s >= WAIT_S  # soon after boot: by hand too
        if not (launch.inherited or late):
            raise
        launch.failure = error
    except Exception as error:
        if not launch.inherited:
            raise
        import traceback

        traceback.print_exc()  # a bug of ours is answered with 503 too: each waiting client would start us again
        launch.failure = BugError(f"the plan could not be made: {error!r}", "please report this, with the journal")
    clock.lap("plan")


def _prepared(launch: Launch, options: Options) -> Prepared:
    """With --yes, or a yes on the terminal, what is missing is built and fetched first."""
    state_dir, yes = Path(options["state_dir"]) if options["state_dir"] else None, bool(options["yes"])
    try:
        prepared = prepare(launch.config, launch.folders)
    except EngineMissingError as missing:
        if missing.recipe is None or launch.inherited:
            raise
        consent.build(missing, missing.recipe, state_dir, yes=yes)
        prepared = prepare(launch.config, launch.folders)
    if prepared.absent:
        if launch.inherited:
            raise fetch_first(prepared.absent)
        consent.fetch(prepared.absent, state_dir, yes=yes)
        prepared = prepare(launch.config, launch.folders)
    return prepared


def _spawn(launch: Launch, clock: _Clock) -> None:
    """Starts every preloaded model's child; on one unified memory they load side by side."""
    if launch.prepared is None:
        return
    for model_id, model in launch.prepared.plan.models.items():
        if not config_of(launch.prepared, model_id).preload:
            continue  # it sleeps until somebody asks
        plan = model.ladder.plans[model.ladder.chosen]
        try:
            gentle = hygiene(wishes_of(launch.prepared, model_id))
            launch.children[model_id] = spawn(plan.argv, plan.env, launch.folders.model_socket(model_id), gentle)
        except UnavailableError:
            if not launch.inherited:
                raise
            # Its supervisor tries once more and says why it has failed.
    launch.spawn_cpu_s = time.process_time()
    clock.lap("spawn")
