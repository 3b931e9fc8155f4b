"""`edgellm plan`: what would be launched here, or on a board that is not here, what it costs, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli.options import Json, StateDir

if TYPE_CHECKING:
    from edge.board.board import Board
    from edge.config import Config
    from edge.engine.engine import Engine
    from edge.folders import Folders
    from edge.plan.assemble import Assembled
    from edge.profile.profile import Profile

EXAMPLE = "Example: edgellm plan -p orin --board orin-nano-8 -m Qwen3.5-4B:Q5_K_M --memory 5.2GiB"


def register(root: typer.Typer) -> None:
    root.command(epilog=EXAMPLE)(plan)


def plan(
    profile: Annotated[str | None, typer.Option("--profile", "-p", metavar="NAME", help="kind of board")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", metavar="[ID=]REF", help="model to serve")] = None,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="set one value")] = None,
    engine: Annotated[str | None, typer.Option("--engine", metavar="ID|PATH", help="engine to plan for")] = None,
    board: Annotated[str | None, typer.Option("--board", metavar="ID", help="plan for this board")] = None,
    root: Annotated[Path | None, typer.Option("--root", metavar="DIR", help="plan for the machine under DIR")] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="available memory")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="all rungs, command line and environment")] = False,
    json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """What would be launched, what it costs in memory, and why: each value with its reason and origin."""
    import os

    from edge.config import load
    from edge.folders import folders

    places = folders(os.environ, state_dir)
    flags: dict[str, object] = {"profile": profile, "model": model or (), "set": set or (), "engine": engine}
    config = load(places, {name: value for name, value in flags.items() if value}, os.environ)
    assembled = _assemble(config, places, board, root, memory)
    if json:
        from json import dumps

        from edge.plan.document import document

        print(dumps(document(assembled.plan), indent=1))
        return
    from edge.render.plan import plan_lines

    print("\n".join(plan_lines(assembled.plan, verbose=verbose)))


def _assemble(
    config: Config, places: Folders, board_id: str | None, root: Path | None, memory: str | None
) -> Assembled:
    from dataclasses import replace

    from edge.board.memory import assumed, snapshot
    from edge.board.named import board_by_id
    from edge.board.probe import probe
    from edge.config import settle
    from edge.errors import UsageError
    from edge.plan.assemble import assemble
    from edge.units import parse_size

    if board_id and root:
        raise UsageError("--board and --root exclude each other", "name a board, or give the tree of one")
    available = parse_size(memory) if memory else None
    board = board_by_id(board_id) if board_id else probe(root or Path("/"))
    now = assumed(board, available) if board_id else snapshot(root or Path("/"), board, available)
    profile = settle(config, board, places)
    engine, note = _engine(config, places, profile, board, elsewhere=bool(board_id or root))
    found = assemble(config, profile, board, now, engine, places, wsl=board.container == "wsl2")
    return replace(found, plan=replace(found.plan, notes=(*found.plan.notes, *note)))


def _engine(
    config: Config, places: Folders, profile: Profile, board: Board, *, elsewhere: bool
) -> tuple[Engine, tuple[str, ...]]:
    """The engine that would be used; where there is none yet, the one that `edgellm build` would make, said so."""
    from edge.engine.choose import choose
    from edge.errors import EngineMissingError
    from edge.plan.assumed import assumed_engine

    wishes = profile.wishes
    recipe = wishes.recipe or profile.name
    assumed = assumed_engine(board, recipe, str(places.engines / recipe / "bin/llama-server"))
    if elsewhere and not config.engine:
        return assumed, (f"planned for an engine built there with `edgellm build -p {recipe}`",)
    needs_gpu = wishes.backend == "cuda" and wishes.fallback != "cpu"
    try:
        found = choose(places, config.engine or None, needs_gpu, profile=recipe, capability=board.compute_capability)
        return found, ()
    except EngineMissingError as error:
        if config.engine:
            raise
        return assumed, (f"{error}: planned as if it were; {error.hint}",)
