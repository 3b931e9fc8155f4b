"""From configuration to a Plan for this machine. Standard library only: the child comes first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.board.board import Board
from edge.board.memory import snapshot
from edge.board.probe import probe
from edge.config import Config, settle
from edge.engine.choose import choose
from edge.folders import Folders
from edge.plan.assemble import assemble
from edge.plan.chosen import fetch_first
from edge.plan.offer import Offer
from edge.plan.plan import Plan
from edge.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Prepared:
    """`absent`: models of the plan that have to be fetched before it can be launched."""

    config: Config
    board: Board
    profile: Profile
    plan: Plan
    absent: dict[str, Offer]


def prepare_present(config: Config, folders: Folders) -> Prepared:
    """As `prepare`; raises ModelMissingError where something would have to be fetched first."""
    prepared = prepare(config, folders)
    if prepared.absent:
        raise fetch_first(prepared.absent)
    return prepared


def prepare(config: Config, folders: Folders, *, root: Path = Path("/")) -> Prepared:
    """Raises ConfigError, EngineMissingError, ModelMissingError, BadModelError, DoesNotFitError."""
    board = probe(root)
    profile = settle(config, board, folders)
    engine = choose(
        folders,
        config.engine or None,
        profile.wishes.backend == "cuda" and profile.wishes.fallback != "cpu",
        profile=profile.wishes.recipe or profile.name,
        capability=board.compute_capability,
    )
    memory = snapshot(root, board)
    assembled = assemble(config, profile, board, memory, engine, folders, wsl=board.container == "wsl2")
    return Prepared(config, board, profile, assembled.plan, assembled.chosen.absent)
