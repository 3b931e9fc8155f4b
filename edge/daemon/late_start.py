"""A start without a plan, behind a socket unit: plan again until that succeeds, and answer 503 meanwhile.

An exit would be repeated for each waiting client. Once the disk is mounted, the folder readable or the memory free,
the model is served without a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from edge.config import Config
from edge.daemon.planning import READ_LIMIT_S
from edge.errors import (
    BadModelError,
    BugError,
    ConfigError,
    DeviceMissingError,
    EdgeError,
    ModelMissingError,
    UsageError,
    read_hangs,
)
from edge.linux.slow_reads import slow_read
from edge.linux.timeouts import DeadlineExceeded, in_thread, within
from edge.plan.prepare import Prepared
from edge.service import unit
from edge.service.access import PathProblem, PathUser, find_problem
from edge.service.unit import Unit
from edge.supervisor.model_handle import UNNAMED, ModelHandle
from edge.supervisor.status import Failure

PATIENCE_S = 30.0  # a late disk is mounted within seconds; a model that was never fetched fails requests after this
LOOK_S = 1.0
LOOK_LATER_S = 15.0


def may_come(error: EdgeError) -> bool:
    """Return whether another plan can succeed with the same configuration (a disk, access, memory, an engine)."""
    return not isinstance(error, (ConfigError, UsageError, BugError))


def placeholders(config: Config, failure: Failure) -> dict[str, ModelHandle]:
    """Return a handle without a supervisor for each configured model, or one for the model that a plan will choose."""
    if not config.models:
        return {UNNAMED: ModelHandle(UNNAMED, pending=failure)}
    return {model.id: ModelHandle(model.id, model.aliases, pending=failure) for model in config.models}


class LateStart:
    """A start without a plan. Requests are held for `patience_s` if a disk or the GPU may be late; else they fail."""

    def __init__(self, config: Config, error: EdgeError, *, patience_s: float = PATIENCE_S) -> None:
        found = obstacle(config, PathUser.me()) if isinstance(error, (ModelMissingError, BadModelError)) else None
        late = found is not None and found.kind in ("missing", "empty")
        late_s = error.patience_s if isinstance(error, DeviceMissingError) else 0.0
        self.patience_s = patience_s if late else late_s
        self.failure = explain(error, found) if found else hidden(error, unit.own())
        self.placeholders = placeholders(config, self.failure)
        if not self.patience_s:
            self.give_up(self.failure)

    def give_up(self, failure: Failure) -> None:
        for handle in self.placeholders.values():
            handle.fail(failure)

    async def until(
        self,
        prepare: Callable[[float], Prepared],
        on_failure: Callable[[Failure], None],
        *,
        look_s: float = LOOK_S,
        look_later_s: float = LOOK_LATER_S,
    ) -> Prepared:
        """Return the first plan. `prepare` is called with the seconds waited so far.

        `on_failure` is called once when patience is over, and again when the reason changes.
        """
        began_s, reported = time.monotonic(), None if self.patience_s else self.failure

        def report(error: EdgeError) -> None:
            nonlocal reported
            failure = self.failure if reported is None and _same(error, self.failure) else failure_of(error)
            over = reported is not None or time.monotonic() - began_s >= self.patience_s
            if over and (reported is None or failure.kind != reported.kind):
                reported = failure
                self.give_up(failure)
                on_failure(failure)

        while True:
            await asyncio.sleep(look_s if reported is None else look_later_s)
            try:
                return await _in_sight(partial(prepare, time.monotonic() - began_s), report)
            except EdgeError as error:
                report(error)


async def _in_sight(prepare: Callable[[], Prepared], report: Callable[[EdgeError], None]) -> Prepared:
    """Return the plan, however late. `report` gets an error each READ_LIMIT_S for which a read in it hangs."""
    planning = asyncio.ensure_future(in_thread(prepare, None))
    try:
        while True:
            try:
                return await within(asyncio.shield(planning), READ_LIMIT_S)
            except DeadlineExceeded:
                path = slow_read(READ_LIMIT_S / 2)
                if path is not None:
                    report(read_hangs(path, READ_LIMIT_S, 0.0))
    finally:
        planning.cancel()


def _same(error: EdgeError, failure: Failure) -> bool:
    return error.kind == failure.kind and failure.evidence.startswith(str(error))


def failure_of(error: EdgeError) -> Failure:
    """Return an error as the failure of a model."""
    return Failure(error.kind, str(error), error.hint or "see `edgellm doctor`")


def explain(error: EdgeError, found: PathProblem) -> Failure:
    """Return the failure with the folder that is in the way."""
    failure = failure_of(error)
    return replace(failure, evidence=f"{failure.evidence}\n{found.sentence}", hint=found.hint)


def hidden(error: EdgeError, own: Unit | None) -> Failure:
    """Return the failure; for a missing GPU, with the drop-ins of our unit that hide it."""
    failure = failure_of(error)
    if not isinstance(error, DeviceMissingError) or own is None or not own.warnings:
        return failure
    hint = f"remove the drop-in (`systemctl edit {own.name}`), then: systemctl restart {own.name}"
    return replace(failure, evidence="\n".join((failure.evidence, *own.warnings)), hint=hint)


def obstacle(config: Config, who: PathUser) -> PathProblem | None:
    """Return the first problem on the paths of the configuration: of models, then of extra folders."""
    refs = [Path(model.ref) for model in config.models if model.ref.startswith("/")]
    for path in [*refs, *(Path(folder) for folder in config.store.dirs)]:
        found = find_problem(path, who)
        if found is not None:
            return found
    return None
