"""From flags and files to a Plan: what `up` launches and `plan` prints. Standard library only."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge.board.board import Board
from edge.board.container import is_wsl
from edge.board.memory import snapshot
from edge.board.probe import probe
from edge.board.tree import Tree
from edge.config import Config, ModelConfig, load, settle
from edge.config.models import id_of
from edge.engine.choose import choose
from edge.errors import ModelMissingError
from edge.folders import Folders
from edge.model.file import ModelFile
from edge.model.store import Store
from edge.plan.environment import EnvFacts
from edge.plan.plan import Plan
from edge.plan.planner import make_plan
from edge.profile.profile import Profile

DEMO = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Prepared:
    config: Config
    board: Board
    profile: Profile
    plan: Plan


def configure(folders: Folders, flags: Mapping[str, object], env: Mapping[str, str]) -> Config:
    return load(folders, flags, env)


def prepare(config: Config, folders: Folders, *, root: Path = Path("/")) -> Prepared:
    """Raises ConfigError, EngineMissingError, ModelMissingError, BadModelError, DoesNotFitError."""
    board = probe(root)
    profile = settle(config, board, folders)
    needs_gpu = profile.wishes.backend == "cuda" and profile.wishes.fallback != "cpu"
    engine = choose(
        folders,
        config.engine or None,
        needs_gpu,
        profile=profile.wishes.recipe or profile.name,
        capability=board.compute_capability,
    )
    store = Store(folders.models, [Path(folder) for folder in config.store.dirs])
    models = {model.id: (store.resolve(model.ref), model) for model in wanted(config, store)}
    memory = snapshot(root, board)
    facts = EnvFacts(
        home=str(folders.cache), cache=str(folders.cache), wsl=is_wsl(Tree(root)), tmp=tempfile.gettempdir()
    )
    return Prepared(config, board, profile, make_plan(board, memory, profile, engine, models, facts))


def wanted(config: Config, store: Store) -> tuple[ModelConfig, ...]:
    """The configured models; without any, the one that is there. Raises ModelMissingError."""
    if config.models:
        return config.models
    usable = [entry for entry in store.list() if entry.verdict is None]
    if not usable:
        hint = f"fetch the demo model: `edgellm model pull {DEMO}` (98 MB), or name a .gguf file with -m"
        raise ModelMissingError("no model is in the store", hint)
    largest = max(usable, key=lambda entry: entry.bytes)
    return (ModelConfig(id_of(largest.name), str(largest.path), origin="the only model here"),)


def files(prepared: Prepared) -> list[ModelFile]:
    return [model.model for model in prepared.plan.models.values()]
