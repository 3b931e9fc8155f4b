"""From configuration to a Plan for this machine. Standard library only: the child comes first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge.board import device_nodes
from edge.board.board import Board
from edge.board.memory import MemorySnapshot, snapshot
from edge.board.probe import probe
from edge.board.visible import VARIABLE, visible
from edge.coldstart import journal
from edge.config import Config, settle
from edge.config.values import ModelConfig, Override
from edge.engine.choose import choose
from edge.engine.fallback import Fallback, fallback, rules, starts_from_records
from edge.engine.installed import read_selection
from edge.errors import DeviceMissingError
from edge.folders import Folders
from edge.plan.assemble import Assembled, assemble
from edge.plan.chosen import fetch_first
from edge.plan.offer import Offer
from edge.plan.plan import Plan
from edge.profile.profile import Profile, Wishes
from edge.resources import data_dir, load_toml


@dataclass(frozen=True, slots=True)
class Prepared:
    """`absent`: models of the plan that have to be fetched before it can be launched. `given_way`: the selected engine
    never became ready, and the one before it serves."""

    config: Config
    board: Board
    profile: Profile
    plan: Plan
    absent: dict[str, Offer]
    given_way: Fallback | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where to look. `waited_s`: for how long a GPU was waited for already; `held_bytes`: what our own engines hold,
    by domain, which a new plan may count as free."""

    root: Path = Path("/")
    waited_s: float = 0.0
    held_bytes: Mapping[str, int] | None = None


def prepare_present(config: Config, folders: Folders, place: Place | None = None) -> Prepared:
    """As `prepare`; raises ModelMissingError where something would have to be fetched first."""
    prepared = prepare(config, folders, place)
    if prepared.absent:
        raise fetch_first(prepared.absent)
    return prepared


def prepare(config: Config, folders: Folders, place: Place | None = None) -> Prepared:
    """Raises ConfigError, EngineMissingError, ModelMissingError, BadModelError, DoesNotFitError, DeviceMissingError."""
    place = place or Place()
    board = visible(probe(place.root), os.environ.get(VARIABLE))
    profile = settle(config, board, folders)
    given_way = None if config.engine else engine_gives_way(folders)
    engine = choose(
        folders,
        config.engine or (given_way.engine if given_way else None),
        profile.wishes.backend == "cuda" and profile.wishes.fallback != "cpu",
        profile=profile.wishes.recipe or profile.name,
        capability=board.compute_capability,
    )

    def assembled_on(board: Board) -> Assembled:
        memory = _counted(snapshot(place.root, board), place.held_bytes)
        return assemble(config, profile, board, memory, engine, folders, wsl=board.container == "wsl2")

    try:
        board = _with_devices(board, profile, config, place)
    except DeviceMissingError:
        # Meanwhile everything else is looked at: what is wrong with it is said now, not after the wait, and the
        # header is in memory when the device comes. A discrete GPU's plan needs the GPU.
        if board.unified_memory:
            assembled_on(board)
        raise
    assembled = assembled_on(board)
    return Prepared(config, board, profile, assembled.plan, assembled.chosen.absent, given_way)


def engine_gives_way(folders: Folders) -> Fallback | None:
    """Whether past starts speak against the selected engine. They are the memory: a service cannot select another."""
    selection = read_selection(folders.engines)
    if selection.current is None or selection.previous is None:
        return None
    starts = starts_from_records(journal.read(folders.starts))
    if all(start.engine != selection.current or start.ready for start in starts):
        return None  # the ordinary case needs no rules
    table = load_toml(data_dir("build") / "llama-server.toml")
    return fallback(selection.current, selection.previous, starts, rules(table))


def wants_gpu(profile: Profile) -> bool:
    return profile.wishes.backend == "cuda" and profile.wishes.offload == "full"


def config_of(prepared: Prepared, model_id: str) -> ModelConfig:
    """What the configuration says of this model; the defaults where it was chosen by itself."""
    return next((model for model in prepared.config.models if model.id == model_id), ModelConfig(model_id, model_id))


def wishes_of(prepared: Prepared, model_id: str) -> Wishes:
    """The profile's, with what `set` of this model says."""
    own: dict[str, Any] = dict(config_of(prepared, model_id).set)
    return replace(prepared.profile.wishes, **own)


def without_gpu(config: Config) -> Config:
    """The same wishes for the CPU: for when the GPU stays away and the profile allows it."""
    cpu = {"backend": "any", "offload": "none", "prefer": "speed"}
    overrides = {key: Override(value, "the GPU is not there") for key, value in cpu.items()}
    return replace(config, overrides={**config.overrides, **overrides})


def _with_devices(board: Board, profile: Profile, config: Config, place: Place) -> Board:
    """The board, without its GPU where that stayed away and the profile allows it. Raises DeviceMissingError."""
    patience_s = device_nodes.wait_limit_s(place.root)
    if config.profile == "auto" and not wants_gpu(profile):
        if place.waited_s < patience_s and device_nodes.driver_pending(board, place.root):
            hint = "the driver may be late: it is waited for; with -p cpu it is not"
            raise DeviceMissingError("an NVIDIA GPU is here, but no driver answers", hint, patience_s=patience_s)
        return board
    if not wants_gpu(profile) or board.refused is not None:
        return board
    found = device_nodes.check_nodes(board, place.root)
    if found.ready:
        return board
    if profile.wishes.fallback != "cpu" or place.waited_s < patience_s:
        raise DeviceMissingError(found.sentence, found.hint, patience_s=patience_s)
    return replace(board, refused=found.sentence)


def _counted(memory: MemorySnapshot, held_bytes: Mapping[str, int] | None) -> MemorySnapshot:
    if not held_bytes:
        return memory
    free = {
        domain: min(memory.total_bytes[domain], available + held_bytes.get(domain, 0))
        for domain, available in memory.available_bytes.items()
    }
    return replace(memory, available_bytes=free)
