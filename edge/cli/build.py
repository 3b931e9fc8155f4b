"""`edgellm build`: compiles llama.cpp for this board."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from edge.engine.request import Request

EXAMPLE = """
Compiles llama-server for this board, proves it, and installs it beside the former ones.

Examples:

    edgellm build                                   # what the board needs

    edgellm build -p orin --dry-run                 # the exact commands and their reasons

    edgellm build --recipe cuda --arch 90           # for a GPU that is not in sight

    edgellm build --source git:b9592 --jobs 2
"""


Profile = Annotated[
    str | None, typer.Option("-p", "--profile", metavar="NAME", help="kind of board: orin, cuda, cpu, …")
]
Board = Annotated[str | None, typer.Option(metavar="ID", help="plan for a board that is not here (with --dry-run)")]
Recipe = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="orin, thor, xavier, cuda, cpu, or a .cmake file")
]
Source = Annotated[str, typer.Option(metavar="WHERE", help="pypi, git, git:TAG or path:DIR")]
Jobs = Annotated[
    int | None, typer.Option("-j", "--jobs", min=1, metavar="N", help="compilers at once (default: what memory allows)")
]
Arch = Annotated[str | None, typer.Option(metavar="N", help="GPU architecture when no GPU is in sight: 87, 90")]
Bindings = Annotated[bool, typer.Option("--bindings", help="build the llama-cpp-python wheel with the same recipe")]
FetchTools = Annotated[bool, typer.Option("--fetch-tools", help="take cmake and ninja from PyPI where they miss")]
NoNative = Annotated[bool, typer.Option("--no-native", help="compile for any CPU of this kind, not only this one")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be done, and why")]
Force = Annotated[bool, typer.Option("--force", help="build an unproven recipe, or again what is built")]
Json = Annotated[bool, typer.Option("--json", help="print a JSON document")]
StateDir = Annotated[Path | None, typer.Option(metavar="DIR", help="keep everything under DIR")]
Root = Annotated[str | None, typer.Option(metavar="DIR", help="read the board from another root folder")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="pretend the board has this memory")]


def register(root: typer.Typer) -> None:
    root.command("build", help=EXAMPLE, short_help="Compile llama.cpp for this board.")(build)


def build(
    profile: Profile = None,
    board: Board = None,
    recipe: Recipe = None,
    source: Source = "pypi",
    jobs: Jobs = None,
    arch: Arch = None,
    bindings: Bindings = False,
    fetch_tools: FetchTools = False,
    no_native: NoNative = False,
    dry_run: DryRun = False,
    force: Force = False,
    json: Json = False,
    state_dir: StateDir = None,
    root: Root = None,
    memory: Memory = None,
) -> None:
    import os

    from edge.engine.order import Order, request_for
    from edge.engine.planning import make_plan
    from edge.errors import UsageError
    from edge.folders import folders
    from edge.render.build import show_plan

    order = Order(profile, board, recipe, source, jobs, arch, root, memory, force, fetch_tools, not no_native)
    request = request_for(order, folders(os.environ, state_dir), os.environ)
    if request.stand_in and not dry_run:
        raise UsageError("a board that is not here cannot be built for", "add --dry-run, or run it on the board")
    if dry_run:
        show_plan(request, make_plan(request), json)
        return
    _build(request, bindings, json)


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
    """SIGTERM ends a build as Ctrl-C does: no compiler is left behind, and the same command goes on."""
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
