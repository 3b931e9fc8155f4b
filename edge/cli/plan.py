"""`edgellm plan`: what would be launched here, or on a board that is not here, what it costs, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli.options import Json, StateDir

if TYPE_CHECKING:
    from edge.prepare import HostView

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
    from edge.prepare import prepare

    places = folders(os.environ, state_dir)
    flags: dict[str, object] = {"profile": profile, "model": model or (), "set": set or (), "engine": engine}
    config = load(places, {name: value for name, value in flags.items() if value}, os.environ)
    prepared = prepare(config, places, _view(board, root, memory), allow_missing=True)
    if json:
        from json import dumps

        from edge.plan.document import document

        print(dumps(document(prepared.plan), indent=1))
        return
    from edge.render.plan import plan_lines

    print("\n".join(plan_lines(prepared.plan, verbose=verbose)))


def _view(board_id: str | None, root: Path | None, memory: str | None) -> HostView:
    from edge.board.named import board_by_id
    from edge.errors import UsageError
    from edge.prepare import HostView
    from edge.units import parse_size

    if board_id and root:
        raise UsageError("--board and --root exclude each other", "name a board, or give the tree of one")
    return HostView(
        root or Path("/"),
        board=board_by_id(board_id) if board_id else None,
        available_bytes=parse_size(memory) if memory else None,
    )
