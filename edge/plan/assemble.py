"""Everything that a plan needs, brought together: store, catalogue and calibration. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from edge.board.board import Board
from edge.board.memory import MemorySnapshot
from edge.config.values import Config
from edge.engine.engine import Engine
from edge.folders import Folders
from edge.model.store import standard
from edge.plan.calibration_file import calibration_path
from edge.plan.calibration_file import load as load_corrections
from edge.plan.chosen import Chooser, Chosen
from edge.plan.environment import EnvFacts
from edge.plan.plan import Plan
from edge.plan.planner import Extras, make_plan, place
from edge.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Assembled:
    """`chosen.absent` is not empty when a model has to be fetched before the plan can be launched."""

    plan: Plan
    chosen: Chosen


def assemble(
    config: Config,
    profile: Profile,
    board: Board,
    memory: MemorySnapshot,
    engine: Engine,
    folders: Folders,
    *,
    wsl: bool = False,
) -> Assembled:
    """Raises UnavailableError and its kinds, BadModelError, DoesNotFitError, UsageError, ConfigError."""
    corrections = load_corrections(calibration_path(folders), engine.id)
    wishes, where = place(board, memory, profile, engine, corrections)
    store = standard(folders, config.store.dirs, os.environ)
    chosen = Chooser(store, where).choose(config, wishes)
    facts = EnvFacts(str(folders.cache), str(folders.cache), wsl)
    plan = make_plan(board, memory, profile, engine, chosen.models, facts, Extras(chosen.smaller, corrections))
    fetch = (f"{offer.id} is not here yet: edgellm model pull {offer.id}" for offer in chosen.absent.values())
    return Assembled(replace(plan, notes=(*plan.notes, *chosen.notes, *fetch)), chosen)
