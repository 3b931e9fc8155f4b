"""Telemetry in a running application: applies the governor's limits, and keeps samples for the records of starts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from aiohttp import web

from edge.board.board import Board, Cpu
from edge.board.probe import probe
from edge.config import Config
from edge.daemon.console import Console
from edge.daemon.journal import Reporter
from edge.errors import EdgeError
from edge.gateway.context import Context
from edge.gateway.handler import CONTEXT
from edge.linux.ordered_writer import Put, at_once
from edge.linux.slow_reads import ReadHangs, answer_of
from edge.paths import Folders
from edge.plan.other_load import LoadWatch, keep_busy_cores, load_path
from edge.plan.prepare import Prepared
from edge.supervisor.model_handle import ModelHandle
from edge.supervisor.state import ENDING, STARTING_STATES, AfterExit, SupervisorState
from edge.supervisor.status import State
from edge.supervisor.supervisor import Supervisor
from edge.telemetry.governor import AdmissionLimit
from edge.telemetry.metrics import TelemetryCollector
from edge.telemetry.sample import Sample
from edge.telemetry.sampler import TracePoint
from edge.telemetry.telemetry import Telemetry

PROBE_S = 2.0  # a plan has waited for the driver before
UNREAD = Board("unknown", "unknown machine", None, None, 0, unified_memory=False, cpu=Cpu("unknown CPU", 1, 1))
SETTLED_S = 30.0  # after a start or an answer: the idle warm-up, and a load that is a mean of the last interval


def telemetry_of(plan: Prepared | EdgeError, config: Config, models: Path) -> Telemetry:
    """Return the configured telemetry for the board of the plan, probed now where there is no plan.

    Where a driver holds up that probe, the sensors that need none: `ThermalControl.follow` adds the others.
    """
    try:
        board = plan.board if isinstance(plan, Prepared) else answer_of(probe, PROBE_S, PROBE_S)
    except ReadHangs:
        board = UNREAD
    return Telemetry.of(board, config.telemetry, config.thermal, models)


class ThermalControl:
    """The telemetry of one application and its consumers. Changes of limits appear on the console."""

    def __init__(
        self,
        telemetry: Telemetry,
        console: Console,
        handles: Mapping[str, ModelHandle],
        folders: Folders,
        put: Put = at_once,
    ) -> None:
        """`handles`: the models, by id; the mapping may change. `put` runs writes to the state folder."""
        self.telemetry = telemetry
        self._handles = handles
        news = logging.getLogger("edge.telemetry")
        news.setLevel(logging.INFO)
        # With the journal, Python's log has a handler for all levels; elsewhere that handler is stderr's for warnings.
        news.propagate = isinstance(console, Reporter)
        news.handlers = [] if news.propagate else [_ConsoleHandler(console)]
        telemetry.on_limit(self._limit)
        self._put = put
        self._load_path = load_path(folders)
        self._load = LoadWatch(self._load_path, os.cpu_count() or 1)
        telemetry.sampler.on_sample(self._note_load)
        self._open: dict[str, ExitStack] = {}  # traces of models that are starting
        self._points: dict[str, list[TracePoint]] = {}

    def limit(self, handle: ModelHandle) -> None:
        """Apply the present limit to a model that was just added."""
        handle.limit_admission(self.telemetry.decision.limit, self.telemetry.decision.because)

    def rest(self) -> None:
        """Apply no limit any more: at shutdown a board that cools down must start nothing."""
        self._handles = {}

    def _limit(self, limit: AdmissionLimit) -> None:
        for handle in list(self._handles.values()):
            handle.limit_admission(limit, self.telemetry.decision.because)

    def _note_load(self, sample: Sample | None) -> None:
        """Count a sample for `n_threads` of the next start, unless an engine of ours may have caused the load."""
        if sample is None or any(_works(handle.supervisor) for handle in self._handles.values() if handle.supervisor):
            return
        cores = self._load.add(sample.cpu_load_ratio)
        if cores is not None:
            self._put(partial(keep_busy_cores, self._load_path, cores), self._load_kept)

    def _load_kept(self, written: bool) -> None:
        if written:
            text = "other processes keep another number of cores busy: n_threads follows at the next start"
            logging.getLogger("edge.telemetry").info(text)

    def attach(self, app: web.Application, priority: Callable[[str], int] = lambda model: 0) -> Context:
        """Connect telemetry to the gateway: documents, metrics, energy and admission. Return the gateway's context.

        `priority` of a model: while the limit is shared the highest goes first, the default model among equals.
        """
        context = app[CONTEXT]
        context.telemetry, context.energy = self.telemetry, self.telemetry.energy

        def rank(model: str) -> tuple[int, bool]:
            default = context.by_name(context.config.default_model)
            return -priority(model), default is None or default.model_id != model

        context.admission.rank = rank
        context.metrics.add(TelemetryCollector(self.telemetry))
        self.telemetry.slots = lambda: sum(handle.slots for handle in self._handles.values())
        self.telemetry.on_limit(lambda limit: context.admission.govern(limit.fraction, limit.hold_new, limit.cause))
        return context

    def became(self, supervisor: Supervisor, machine: SupervisorState) -> None:
        """Pass a state change to the model's handle; keep ten samples a second while it starts, for its record."""
        model_id = supervisor.model_id
        handle = self._handles.get(model_id)
        if handle is not None:
            handle.supervisor_changed(supervisor, machine.state)
        if machine.state is State.DRAINING and machine.then is AfterExit.SLEEP:
            self.telemetry.falls_asleep(model_id)
        elif machine.state in STARTING_STATES:
            self.telemetry.wakes(model_id)
        if machine.state in STARTING_STATES and model_id not in self._open:
            stack = self._open[model_id] = ExitStack()
            self._points[model_id] = stack.enter_context(self.telemetry.trace())
        elif machine.state not in STARTING_STATES and model_id in self._open:
            self._open.pop(model_id).close()

    def samples(self, model_id: str, zero_s: float) -> list[list[float | int | None]]:
        """Return the samples of the start that just ended: [[seconds since `zero_s`, W, bytes, °C]]."""
        points = self._points.pop(model_id, [])
        return [[round(at - zero_s, 3), *(_rounded(value) for value in rest)] for at, *rest in points]


def _works(supervisor: Supervisor) -> bool:
    """Return whether an engine starts, answers, warms up, or did so moments ago."""
    if supervisor.machine.state in STARTING_STATES | ENDING or supervisor.traffic.open:
        return True
    watch = supervisor.watch
    began_s = max(supervisor.traffic.moved_s, (watch.first_token_s or 0.0) if watch else 0.0)
    return time.monotonic() - began_s < SETTLED_S


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        say = self._console.warn if record.levelno >= logging.WARNING else self._console.say
        say(record.getMessage())


def _rounded(value: float | int | None) -> float | int | None:
    return round(value, 2) if isinstance(value, float) else value
