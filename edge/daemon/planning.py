"""The part of a launch that knows configuration and planner: makes the first plan, or confirms a remembered launch."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from edge.board import nvidia
from edge.board.device_nodes import WAIT_S, gpu_nodes
from edge.config import Config, load
from edge.config.values import Preset
from edge.daemon import consent
from edge.daemon.children import Children, Clock, Early, claim
from edge.daemon.console import Console
from edge.daemon.kept_by_model import KeptRemedies, key, remedies_path
from edge.daemon.lock import Lock
from edge.daemon.options import given
from edge.daemon.remembered_launch import (
    EngineCommand,
    Identity,
    RememberedLaunch,
    board_identity,
    identity,
    keep,
    relevant,
    trace_inputs,
    working_directory,
)
from edge.daemon.start_timeline import Span
from edge.daemon.template_verdicts import judged
from edge.engine.choose import EngineFallback, fallback_now
from edge.errors import (
    BugError,
    DeviceMissingError,
    EdgeError,
    EngineMissingError,
    TimedOutError,
    UnavailableError,
    read_hangs,
)
from edge.linux.procfs import read_usage
from edge.linux.sd_notify import Notifier
from edge.linux.slow_reads import ReadHangs, answer_of, slow_reads_noticed
from edge.linux.sockets import Listeners
from edge.linux.tree import Tree
from edge.paths import Folders
from edge.plan import start_records
from edge.plan.calibration_file import calibration_path
from edge.plan.choices import LoadChoice, choice_for, choices_path, offload_of, read_choices
from edge.plan.choose import NotDownloadedError
from edge.plan.plan import LaunchPlan, ModelPlan
from edge.plan.prepare import HostView, Prepared, preloaded, prepare, preset_of
from edge.supervisor.process import ProcessLimits

# A hard disk spins up within this time. What hangs for longer is waited for with the gateway open.
READ_LIMIT_S = 10.0
# The slowest plan that is known: two engines whose first CUDA calls take 90 s each after a cold boot (llama.cpp#27923).
PLAN_LIMIT_S = 240.0


class Request(NamedTuple):
    """What `up` was called with. `sockets`: inherited from systemd."""

    argv: list[str]
    options: dict[str, Any]
    folders: Folders
    sockets: list[Any]

    @property
    def state_dir(self) -> Path | None:
        return Path(self.options["state_dir"]) if self.options["state_dir"] else None


class LaunchTimes(NamedTuple):
    """When the process began (monotonic), the launcher's spans since then, and its CPU time until the spawn."""

    began_s: float
    spans: tuple[Span, ...] = ()
    spawn_cpu_s: float | None = None
    remembered: bool = False


class Launched(NamedTuple):
    """A started process with open sockets and running engines. `plan` is the error to serve where none was made."""

    request: Request
    config: Config
    plan: Prepared | EdgeError
    lock: Lock
    listeners: Listeners
    notifier: Notifier
    children: Children
    times: LaunchTimes
    inputs: dict[str, Identity]  # the files that the plan was made from
    notes: tuple[str, ...] = ()  # about the remembered launch, for the console

    @property
    def folders(self) -> Folders:
        return self.request.folders

    @property
    def flags(self) -> dict[str, Any]:
        """Return the options of the command line, for a reload."""
        return given(self.request.options)


def launch(request: Request, early: Early | None, children: Children, clock: Clock, notifier: Notifier) -> Launched:
    """Plan and spawn, or confirm the engines that run by a remembered launch. Raises EdgeError where `up` should exit.

    Fills `children`, which the caller kills if this raises.
    """
    inherited = early.listeners.inherited if early else bool(request.sockets)
    nvidia.on_wait = partial(_waits_for_driver, notifier, Console(as_json=bool(request.options["json"])))
    notes: tuple[str, ...] = ()
    confirmed = False
    with trace_inputs(request.folders) as inputs, slow_reads_noticed(nvidia.on_wait):
        config, failure = _configure(request, inherited=inherited)
        if early is None:
            lock, listeners = claim(
                request.folders, request.sockets, list(config.listen), tls=bool(config.gateway.tls_cert)
            )
            clock.lap("configure")
        else:
            lock, listeners = early.lock, early.listeners
        plan = failure or _plan(request, config, early, children, inherited=inherited)
    clock.lap("plan")
    if early is not None and children:
        plan, notes = _confirm(plan, early.remembered, children, KeptRemedies(request.folders))
        confirmed = bool(children)
        if not children and failure is None:
            plan = _plan(request, config, None, children, inherited=inherited)
    if isinstance(plan, Prepared) and not children:
        _spawn(plan, request.folders, children, inherited=inherited)
        clock.spawned()
    spans = tuple(Span(name, None, start_s, end_s) for name, start_s, end_s in clock.laps)
    times = LaunchTimes(clock.began_s, spans, clock.spawn_cpu_s if children else None, confirmed)
    return Launched(request, config, plan, lock, listeners, notifier, children, times, inputs, (*config.notes, *notes))


def _waits_for_driver(notifier: Notifier, console: Console, text: str) -> None:
    notifier.status(text)
    console.say(text)


def process_limits(preset: Preset) -> ProcessLimits:
    """Return the limits that a preset requests."""
    return ProcessLimits(preset.nice, preset.oom_score_adj, preset.cpus)


def remember(launched: Launched, prepared: Prepared) -> RememberedLaunch | None:
    """Return the record of a launch that became READY as planned; None if another start should plan anew."""
    if not launched.inputs or prepared.fallback is not None or prepared.board.refused is not None or prepared.absent:
        return None
    models, needed = {}, 0
    uses_gpu = False
    for model_id in launched.children:
        model = prepared.plan.models[model_id]
        plan = model.ladder.plans[model.ladder.chosen]
        if plan.settings.rpc:
            return None  # the next start asks the rpc-servers first
        models[model_id] = _command(prepared, model_id, launched.folders)
        uses_gpu |= plan.settings.n_gpu_layers > 0
        host = plan.budget.get("unified") or plan.budget.get("host")
        needed += host.required_bytes + (0 if needed else host.reserve_bytes) if host else 0
    calibrated, remedies = str(calibration_path(launched.folders)), str(remedies_path(launched.folders))
    nodes = gpu_nodes(prepared.board, Tree(Path("/"))).names if uses_gpu else ()
    return RememberedLaunch(
        argv=launched.request.argv,
        cwd=working_directory(),
        env=relevant(os.environ),
        listen=list(launched.config.listen),
        tls=bool(launched.config.gateway.tls_cert),
        # This start has calibrated itself; remedies are read after the plan.
        files=launched.inputs | {each: identity(each) for each in (calibrated, remedies)},
        board=board_identity(),
        nodes=[node for node in nodes if os.access(node, os.R_OK | os.W_OK)],
        needed_bytes=needed,
        models=models,
        at=round(time.time(), 1),
    )


def keep_launch(launched: Launched, prepared: Prepared) -> None:
    """Write the record of a launch that became READY as planned, unless another start should plan anew. Blocking."""
    record = remember(launched, prepared)
    if record is not None:
        keep(launched.folders, record)


def fallback_of(folders: Folders) -> EngineFallback | None:
    """Return why the former engine serves in place of the selected one, by the records on the disk. Blocking."""
    return fallback_now(folders.engines, start_records.read(folders.starts))


def _configure(request: Request, *, inherited: bool) -> tuple[Config, EdgeError | None]:
    """Load the configuration. Behind a socket unit return its error: after an exit each client would start us again."""
    try:
        config = load(request.folders, given(request.options), os.environ)
        if request.options["lan"]:
            config = consent.for_the_network(config, request.folders, request.options)
        return config, None
    except EdgeError as error:
        if not inherited:
            raise
        return Config(), error


def _plan(
    request: Request, config: Config, early: Early | None, children: Children, *, inherited: bool
) -> Prepared | EdgeError:
    """Return the plan, or the error to serve in its place. Raises EdgeError where `up` should exit."""
    try:
        if early is not None and children:
            held = _held_by(children, early.remembered)
            try:
                return _planned(config, request.folders, HostView(held_bytes=held), ask=False)
            except EdgeError as error:
                return error  # judged by `_confirm`, which ends the engines and has the plan made again
        return _prepare(request, config, inherited=inherited)
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


def _prepare(request: Request, config: Config, *, inherited: bool) -> Prepared:
    """Plan; with --yes, or a yes on the terminal, build and fetch what is missing first."""
    yes, folders = bool(request.options["yes"]), request.folders
    for _ in ("an engine", "a drafter", "models"):
        try:
            return _planned(config, folders)
        except EngineMissingError as missing:
            if missing.recipe is None or inherited:
                raise
            rehearse = partial(prepare, config, folders, allow_missing=True)
            try:
                consent.build(missing, missing.recipe, request.state_dir, rehearse, yes=yes)
            except NotDownloadedError as drafter:  # the rehearsal reads its header
                consent.fetch(drafter.downloads, request.state_dir, yes=yes)
        except NotDownloadedError as missing:
            if inherited:
                raise
            consent.fetch(missing.downloads, request.state_dir, yes=yes)
    return _planned(config, folders)


def _planned(config: Config, folders: Folders, view: HostView | None = None, *, ask: bool = True) -> Prepared:
    """Return the plan. Raises DeviceMissingError where a driver or a disk hangs, TimedOutError, and as `prepare`."""
    try:
        plan = partial(prepare, config, folders, view)
        return answer_of(lambda: judged(plan(), folders, ask=ask), PLAN_LIMIT_S, READ_LIMIT_S)
    except ReadHangs as hang:
        if hang.path is not None:
            raise read_hangs(hang.path, hang.waited_s, WAIT_S) from None
        raise no_plan(hang.waited_s) from None


def no_plan(waited_s: float) -> TimedOutError:
    """Return the error for a plan that waits for something else than a read."""
    return TimedOutError(f"no plan was made within {waited_s:.0f} s", "see `edgellm doctor`")


def _spawn(prepared: Prepared, folders: Folders, children: Children, *, inherited: bool) -> None:
    """Start every preloaded model's engine; on one unified memory they load side by side."""
    kept = KeptRemedies(folders)
    for model_id, model in prepared.plan.models.items():
        if not preloaded(prepared, model) or model.other is not None:
            continue  # its first request starts it, or its supervisor
        if kept.of(model_id, key(model.model.fingerprint, prepared.plan.engine.id, model.ladder.chosen)):
            continue  # its supervisor starts it, with the remedies that its last start needed
        try:
            children.start(model_id, _command(prepared, model_id, folders), folders.model_socket(model_id))
        except UnavailableError:
            # Behind a socket unit the supervisor tries once more and reports the reason.
            if not inherited:
                raise


def _command(prepared: Prepared, model_id: str, folders: Folders) -> EngineCommand:
    model = prepared.plan.models[model_id]
    plan = model.ladder.plans[model.ladder.chosen]
    nice, oom_score_adj, cpus = process_limits(preset_of(prepared, model_id))
    return EngineCommand(
        argv=list(plan.argv),
        env=dict(plan.env),
        limits=[nice, oom_score_adj, list(cpus)],
        files=list((plan.model or model.model).shards),
        prefetch_least_bytes=_prefetch_least_bytes(prepared, model_id, folders),
        held_bytes={domain: freed_bytes(plan, domain) for domain in plan.budget},
        cold_argv=list(plan.cold.argv) if plan.cold else None,
        cold_below=_cold_below(plan),
    )


def _cold_below(plan: LaunchPlan) -> float:
    return plan.cold.below if plan.cold else 0.0


def _prefetch_least_bytes(prepared: Prepared, model_id: str, folders: Folders) -> int | None:
    """Return the memory that prefetching must leave, where `edgellm bench load` found that it helps; None elsewhere."""
    model = prepared.plan.models[model_id]
    plan = model.ladder.plans[model.ladder.chosen]
    file = plan.model or model.model
    choices = read_choices(choices_path(folders, LoadChoice), LoadChoice, prepared.board.id, prepared.plan.engine.id)
    offload = offload_of(plan.settings.n_gpu_layers, file.meta.n_layer)
    choice = choice_for(choices, file.path, file.bytes, offload)
    if choice is None or not choice.prefetch or choice.mode != plan.settings.load_mode:
        return None
    host = plan.budget.get("unified") or plan.budget.get("host")
    return host.reserve_bytes if host else 0


# --- a remembered launch against the plan ----------------------------------------------------------------------------


def _confirm(
    plan: Prepared | EdgeError, remembered: RememberedLaunch, children: Children, kept: KeptRemedies
) -> tuple[Prepared | EdgeError, tuple[str, ...]]:
    """Keep the running engines if the plan would run them; end them otherwise. Return the plan, and notes."""
    reason = str(plan) if isinstance(plan, EdgeError) else None
    better: list[str] = []
    if isinstance(plan, Prepared):
        models = {}
        for model_id, model in plan.plan.models.items():
            if model.other is not None:
                models[model_id] = model  # its supervisor starts it
                continue
            running = remembered.models.get(model_id)
            rung = None if running is None else _rung(model, running)
            limits = list(process_limits(preset_of(plan, model_id)))
            if (running is not None) != preloaded(plan, model):
                reason = f"{model_id} is {'no longer preloaded' if running else 'another model'}"
            elif running is not None and (rung is None or rung < model.ladder.chosen):
                reason = f"{model_id} {'gets another command line' if rung is None else 'no longer fits'}"
            elif running is not None and limits != [*running.limits[:2], tuple(running.limits[2])]:
                reason = f"{model_id} gets other process limits"
            elif rung is not None and kept.of(model_id, key(model.model.fingerprint, plan.plan.engine.id, rung)):
                reason = f"{model_id} starts with remedies now"
            elif rung is not None and rung > model.ladder.chosen:
                better.append(f"{model_id}: more memory is free than at the remembered start; a new start uses it")
            models[model_id] = model if rung is None else replace(model, ladder=replace(model.ladder, chosen=rung))
        if set(remembered.models) - set(models):
            reason = "another model is planned"
        plan = replace(plan, plan=replace(plan.plan, models=models)) if reason is None else plan
    if reason is not None:
        children.kill()
        return plan, (f"the remembered launch was replaced: {reason}",)
    return plan, tuple(better)


def _rung(model: ModelPlan, running: EngineCommand) -> int | None:
    """Return the rung that a command belongs to."""
    commands = [
        (list(plan.argv), plan.env, list(plan.cold.argv) if plan.cold else None, _cold_below(plan))
        for plan in model.ladder.plans
    ]
    command = (running.argv, running.env, running.cold_argv, running.cold_below)
    return commands.index(command) if command in commands else None


def _held_by(children: Children, remembered: RememberedLaunch) -> dict[str, int]:
    """Return the bytes by memory domain that the loading engines may hold already: the plan counts them as free.

    On the host that is their own memory now. What a GPU holds is not visible per process on every board: at most what
    the plan gave them.
    """
    held: dict[str, int] = {}
    for model_id, child in children.items():
        usage = read_usage(child.pid)
        for domain, size in remembered.models[model_id].held_bytes.items():
            now = usage.rss_anon_bytes if domain == "host" and usage is not None else size
            held[domain] = held.get(domain, 0) + now
    return held


def freed_bytes(plan: LaunchPlan, domain: str) -> int:
    """Return what an engine of this plan gives back in a memory domain when it ends, beside what is available."""
    budget = plan.budget[domain]
    # MemAvailable counts mapped weights already: they are clean page cache. Those on a GPU are copies.
    in_page_cache = plan.settings.load_mode == "mmap" and domain in ("host", "unified")
    mapped = budget.weights_bytes if in_page_cache else 0
    return max(0, budget.required_bytes - mapped - budget.prompt_cache_bytes)
