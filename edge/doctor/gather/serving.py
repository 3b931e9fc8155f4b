"""Read what `up` would serve: configuration, profile, engine, models. An error there becomes a fact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edge.board.board import Board
from edge.config.load import load, resolve_profile
from edge.config.values import Config, ModelConfig
from edge.doctor.facts import Serving, WantedModel
from edge.engine.installed import manifest
from edge.errors import EdgeError
from edge.folders import Folders
from edge.model.store import Store, standard
from edge.prepare import engine_for
from edge.profile.profile import Profile


def read_serving(
    board: Board, folders: Folders, env: Mapping[str, str], flags: Mapping[str, object], live: bool
) -> Serving:
    """Read the configuration with `flags` by Option.dest, as `up` takes them."""
    try:
        config = load(folders, flags, env)
        profile = resolve_profile(config, board, folders)
    except EdgeError as error:
        return Serving(config_problem=str(error), config_hint=error.hint)
    serving = Serving(
        profile=profile.name,
        listen=config.listen,
        needs_gpu=profile.wishes.backend == "cuda",
        power_mode_wanted=profile.wishes.power_mode or None,
    )
    if not live:
        return replace(serving, engine_problem="engines are not looked for in a copied tree")
    return _with_model(
        _with_engine(serving, config, profile, board, folders), config, standard(folders, config.store.dirs, env)
    )


def _with_engine(serving: Serving, config: Config, profile: Profile, board: Board, folders: Folders) -> Serving:
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


def _with_model(serving: Serving, config: Config, store: Store) -> Serving:
    """Add the configured models and the biggest usable file, which has the longest cold start."""
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
