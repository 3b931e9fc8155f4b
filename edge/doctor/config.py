"""Checks of configuration, profile and models, and how their facts are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge.board.board import Board
from edge.config.devices import DeviceConfig
from edge.config.load import load, resolve_profile
from edge.config.values import Config, ModelConfig, Profile
from edge.doctor.check import Finding, bad, ok, warn
from edge.doctor.facts import DoctorFacts, RemoteBoard, ServingFacts, WantedModel
from edge.engine.installed import manifest
from edge.errors import EdgeError
from edge.linux.files import visible
from edge.linux.procfs import lock_holders
from edge.linux.rpc import connected
from edge.models.store import Store, standard
from edge.paths import Folders
from edge.plan.prepare import HostView, engine_for, prepare
from edge.plan.remotes import ask_device, check_engine, usable_memory
from edge.units import format_bytes


def valid(facts: DoctorFacts) -> Finding:
    """Check that configuration and profile can be read."""
    serving = facts.serving
    if serving.config_problem is not None:
        return bad(serving.config_problem, serving.config_hint or "correct it", "edgellm config show")
    return ok(f"profile {serving.profile}, listening on {', '.join(serving.listen)}")


def models(facts: DoctorFacts) -> tuple[Finding, ...]:
    """Check that every configured model resolves to a usable file; without any, name the model that `up` takes."""
    serving = facts.serving
    if not facts.live or serving.config_problem is not None:
        return ()
    missing = [model for model in serving.models if model.problem is not None]
    if missing:
        return tuple(bad(f"{m.id}: {m.problem}", m.hint or "fetch it with `edgellm model pull`") for m in missing)
    if serving.models:
        return (ok(f"found: {', '.join(model.id for model in serving.models)}"),)
    if serving.model_file is None:
        if serving.advised is None:
            return (warn("the store holds no model", "`edgellm model list --catalogue` shows some"),)
        step = f"fetch {serving.advised}, which `edgellm up` would choose"
        return (warn("the store holds no model", step, f"edgellm model pull {serving.advised}"),)
    if serving.advised is None:
        says = f"none configured, and none can be planned: {serving.plan_problem or 'the planner names none'}"
        return (warn(says, serving.plan_hint or "name one in edgellm.toml", "edgellm plan"),)
    if serving.advised_file is None:
        step = f"fetch {serving.advised}, which `edgellm up` would choose"
        return (
            warn("none configured, and the store has none to choose", step, f"edgellm model pull {serving.advised}"),
        )
    return (ok(f"none configured: {serving.advised} is served"),)


def remotes(facts: DoctorFacts) -> tuple[Finding, ...]:
    """Check that each rpc-server of [[device]] answers the protocol, and that the engine can use it."""
    serving = facts.serving
    if serving.remotes_problem is not None:
        return (bad(serving.remotes_problem, "build one on each board", "edgellm build --rpc"),)
    return tuple(_remote(board) for board in serving.remotes)


def _remote(board: RemoteBoard) -> Finding:
    if board.problem is not None:
        step = board.hint or "see docs/rpc.md"
        if board.optional:
            return warn(f"{board.problem}; a smaller plan serves without it", step)
        return bad(board.problem, step)
    if board.free_bytes is None:
        return ok(f"the rpc-server at {board.endpoint} serves an engine of this board")
    return ok(f"the rpc-server at {board.endpoint} lends {format_bytes(board.free_bytes)}")


CHECKS: dict[str, Callable[[DoctorFacts], Finding | tuple[Finding, ...]]] = {
    "config.valid": valid,
    "config.model": models,
    "config.device": remotes,
}


# Read what `up` would serve: configuration, profile, engine, models. An error there becomes a fact.


def read_serving(
    board: Board, folders: Folders, env: Mapping[str, str], flags: Mapping[str, object], live: bool
) -> ServingFacts:
    """Read the configuration with `flags` by Option.dest, as `up` takes them."""
    try:
        config = load(folders, flags, env)
        profile = resolve_profile(config, board, folders)
    except EdgeError as error:
        return ServingFacts(config_problem=str(error), config_hint=error.hint)
    serving = ServingFacts(
        profile=profile.name,
        listen=config.listen,
        needs_gpu=profile.preset.backend == "cuda",
        power_mode_wanted=profile.preset.power_mode or None,
    )
    if not live:
        return replace(serving, engine_problem="engines are not looked for in a copied tree")
    serving = read_remotes(_with_engine(serving, config, profile, board, folders), config.devices)
    serving = _with_model(serving, config, standard(folders, config.store.dirs, env))
    return serving if serving.models else _with_choice(serving, config, folders)


def _with_choice(serving: ServingFacts, config: Config, folders: Folders) -> ServingFacts:
    """Add the model that `edgellm plan` and `up` take where none is configured: in the store, or to be fetched."""
    # What the engines of a running edgellm hold is free for its own plan.
    view = HostView(at_boot=bool(lock_holders(folders.lock)))
    try:
        chosen = next(iter(prepare(config, folders, view, allow_missing=True).plan.models.values()), None)
    except EdgeError as error:
        return replace(serving, plan_problem=str(error), plan_hint=error.hint)
    if chosen is None:
        return serving
    file = Path(chosen.model.path)
    name = f"{chosen.model.name}:{chosen.model.quant}"
    return replace(serving, advised=name, advised_file=file if visible(file) else None)


def _with_engine(
    serving: ServingFacts, config: Config, profile: Profile, board: Board, folders: Folders
) -> ServingFacts:
    """Choose the engine without regard to the GPU; the checks judge whether it fits."""
    try:
        engine = engine_for(config, profile, board, folders, needs_gpu=False)
    except EdgeError as error:
        return replace(serving, engine_problem=str(error), engine_hint=error.hint)
    return replace(serving, engine=engine, engine_cuda=_built_with(folders, engine.id) if engine.cuda else None)


def _built_with(folders: Folders, engine_id: str) -> str | None:
    """Return the CUDA version of the build from engine.json; an engine given by path has none."""
    try:
        target: dict[str, Any] = manifest(folders.engines, engine_id)["target"]
    except (EdgeError, KeyError):
        return None
    version = target.get("cuda_runtime")
    return ".".join(version.split(".")[:2]) if isinstance(version, str) else None


def read_remotes(serving: ServingFacts, devices: Sequence[DeviceConfig]) -> ServingFacts:
    """Ask each rpc-server, as a plan would; one that serves an engine of this board is not asked."""
    if devices and serving.engine is not None:
        try:
            check_engine(serving.engine)
        except EdgeError as error:
            return replace(serving, remotes_problem=str(error))
    return replace(serving, remotes=tuple(map(_asked, devices)))


def _asked(device: DeviceConfig) -> RemoteBoard:
    found = RemoteBoard(device.rpc, optional=device.absent == "without")
    if connected(None, device.rpc):
        return found
    try:
        memory = usable_memory(device, ask_device(device))
    except EdgeError as error:
        return replace(found, problem=str(error), hint=error.hint)
    return replace(found, free_bytes=sum(each.free_bytes for each in memory))


def _with_model(serving: ServingFacts, config: Config, store: Store) -> ServingFacts:
    """Add the configured models and the biggest usable file, which has the longest cold start: for the read rate."""
    serving = replace(serving, models=tuple(_wanted(store, model) for model in config.models))
    usable = [entry for entry in store.list() if entry.verdict is None]
    if not usable:
        return serving
    biggest = max(usable, key=lambda entry: entry.bytes)
    return replace(serving, model_bytes=biggest.bytes, model_file=biggest.path)


def _wanted(store: Store, model: ModelConfig) -> WantedModel:
    try:
        store.resolve(model.ref)
    except EdgeError as error:
        return WantedModel(model.id, model.ref, str(error), error.hint)
    return WantedModel(model.id, model.ref)
