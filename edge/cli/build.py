"""`edgellm build`: compile llama.cpp for this board."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from edge.cli.options import DryRun, Json, Memory, Profile, StateDir, folders_of
from edge.errors import UsageError

if TYPE_CHECKING:
    from edge.engine.request import Request

EXAMPLE = """
Compile llama-server for this board, prove it, and install it beside the earlier ones.

Examples:

    edgellm build                                   # the recipe of this board

    edgellm build -p orin --dry-run                 # the exact commands and their reasons

    edgellm build --recipe cuda --arch 90           # for a GPU that is not in sight

    edgellm build --source git:b9592 --jobs 2
"""


BoardId = Annotated[str | None, typer.Option("--board", metavar="ID", help="a board that is not here (with --dry-run)")]
Recipe = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="orin, thor, xavier, cuda, cpu, or a .cmake file")
]
Source = Annotated[str, typer.Option(metavar="WHERE", help="pypi, git, git:TAG or path:DIR")]
Jobs = Annotated[
    int | None, typer.Option("-j", "--jobs", min=1, metavar="N", help="parallel compilers (default: by memory)")
]
Arch = Annotated[str | None, typer.Option(metavar="N", help="GPU architecture when no GPU is in sight: 87, 90")]
Bindings = Annotated[bool, typer.Option("--bindings", help="build the llama-cpp-python wheel with the same recipe")]
FetchTools = Annotated[bool, typer.Option("--fetch-tools", help="take a missing cmake or ninja from PyPI")]
NoNative = Annotated[bool, typer.Option("--no-native", help="compile for any CPU of this kind, not only this one")]
Force = Annotated[bool, typer.Option("--force", help="build an unproven recipe, or again what is built")]
Root = Annotated[str | None, typer.Option(metavar="DIR", help="a machine whose proc and sys lie in DIR")]


def register(root: typer.Typer) -> None:
    root.command("build", help=EXAMPLE, short_help="Compile llama.cpp for this board.")(build)


def build(
    profile: Profile = None,
    board: BoardId = None,
    recipe: Recipe = None,
    source: Source = "pypi",
    jobs: Jobs = None,
    arch: Arch = None,
    bindings: Bindings = False,
    fetch_tools: FetchTools = False,
    no_native: NoNative = False,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: Json = False,
    state_dir: StateDir = None,
    root: Root = None,
    memory: Memory = None,
) -> None:
    from edge.engine.order import Order, request_for
    from edge.engine.planning import make_plan
    from edge.render.build import show_plan

    order = Order(profile, board, recipe, source, jobs, arch, root, memory, force, fetch_tools, not no_native)
    request = request_for(order, folders_of(state_dir), os.environ)
    if request.stand_in and not dry_run:
        raise UsageError("a build needs the board itself", "add --dry-run, or run it on the board")
    if dry_run:
        show_plan(request, make_plan(request), as_json)
        return
    _build(request, bindings, as_json)


def _build(request: Request, bindings: bool, as_json: bool) -> None:
    from edge.engine.bindings import build_bindings
    from edge.engine.builder import build as build_engine
    from edge.engine.download import fetch_tools
    from edge.engine.planning import build_table, make_plan
    from edge.render.build import Screen, show_bindings, show_intent, show_result

    with _ended_by_sigterm(), Screen() as screen:
        if request.fetch_tools:
            fetch_tools(request.tools_dir, build_table()["tools"]["wheels"], screen.report.say)
        plan = make_plan(request)
        show_intent(plan, screen.report.say)
        if bindings:
            wheel = build_bindings(request, plan, screen.report)
        else:
            result = build_engine(request, plan, screen.report)
    if bindings:
        show_bindings(wheel, as_json)
    else:
        show_result(result, as_json)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End a build at SIGTERM as at Ctrl-C: no compiler is left behind, and the same command continues."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
