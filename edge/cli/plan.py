"""`edgellm plan`: the launch plan of this machine or of another board, its memory and its reasons."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli.options import (
    BoardId,
    Engine,
    Json,
    Memory,
    Models,
    Profile,
    RootDir,
    Set,
    StateDir,
    folders_of,
    given,
    print_json,
)
from edge.errors import UsageError

if TYPE_CHECKING:
    from edge.prepare import HostView


def register(root: typer.Typer) -> None:
    example = "Example: edgellm plan -p orin --board orin-nano-8 -m Qwen3.5-4B:Q5_K_M --memory 5.2GiB"
    root.command(epilog=example)(plan)


def plan(
    profile: Profile = None,
    model: Models = None,
    set: Set = None,
    engine: Engine = None,
    board: BoardId = None,
    root_dir: RootDir = None,
    memory: Memory = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="all rungs, command line and environment")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Show what `up` would launch and what it costs in memory: each value with its reason and origin."""
    from edge.config import load
    from edge.prepare import prepare

    folders = folders_of(state_dir)
    config = load(folders, given(profile=profile, model=model, set=set, engine=engine), os.environ)
    prepared = prepare(config, folders, _view(board, root_dir, memory), allow_missing=True)
    if as_json:
        from edge.plan.document import document

        print_json(document(prepared.plan), indent=1)
        return
    from edge.render.plan import plan_lines

    typer.echo("\n".join(plan_lines(prepared.plan, verbose=verbose)))


def _view(board_id: str | None, root: Path | None, memory: str | None) -> HostView:
    from edge.board.named import board_by_id
    from edge.prepare import HostView
    from edge.units import parse_size

    if board_id and root:
        raise UsageError("--board and --root exclude each other", "name a board, or give the tree of one")
    return HostView(
        root or Path("/"),
        board=board_by_id(board_id) if board_id else None,
        available_bytes=parse_size(memory) if memory else None,
    )
