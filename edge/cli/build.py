"""`edgellm build`: compile llama.cpp for this board."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from edge.builder.build import BuildReport
from edge.builder.compile import NinjaProgress as Step
from edge.builder.plan import plan_document, result_document, shell
from edge.builder.request import BuildPlan, BuildRequest, BuildResult
from edge.cli.options import DryRun, Json, Memory, Profile, StateDir, folders_of, print_json, print_result
from edge.cli.output import console, error_console
from edge.errors import UsageError
from edge.units import format_bytes, format_seconds

EXAMPLE = """
Compile llama-server for this board, prove it, and install it beside the earlier ones.

Examples:

    edgellm build                                   # the recipe of this board

    edgellm build -p orin --dry-run                 # the exact commands and their reasons

    edgellm build --recipe cuda --arch 90           # for a GPU that is not in sight

    edgellm build --source git:b9592 --jobs 2

    edgellm build --rpc                             # with layers on other boards (docs/rpc.md)
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
FetchTools = Annotated[bool, typer.Option("--fetch-tools", help="take a missing or too old cmake or ninja from PyPI")]
NoNative = Annotated[bool, typer.Option("--no-native", help="compile for any CPU of this kind, not only this one")]
Rpc = Annotated[bool, typer.Option("--rpc", help="with llama.cpp's RPC backend, for layers on other boards")]
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
    rpc: Rpc = False,
    dry_run: DryRun = False,
    force: Force = False,
    as_json: Json = False,
    state_dir: StateDir = None,
    root: Root = None,
    memory: Memory = None,
) -> None:
    from edge.builder.plan import make_plan
    from edge.builder.request import BuildOptions, request_for

    order = BuildOptions(
        profile, board, recipe, source, jobs, arch, root, memory, force, fetch_tools, not no_native, rpc
    )
    request = request_for(order, folders_of(state_dir), os.environ)
    if request.stand_in and not dry_run:
        raise UsageError("a build needs the board itself", "add --dry-run, or run it on the board")
    if dry_run:
        show_plan(request, make_plan(request), as_json)
        return
    _build(request, bindings, as_json)


def _build(request: BuildRequest, bindings: bool, as_json: bool) -> None:
    from edge.builder.build import build as build_engine
    from edge.builder.build import build_bindings
    from edge.builder.download import fetch_tools
    from edge.builder.plan import build_table, lacks_tools, make_plan, refuse_foreign

    with _ended_by_sigterm(), Screen() as screen:
        # Before the plan, whose preflight would report the missing tools.
        if request.fetch_tools:
            refuse_foreign(request.build_root.parent)
            if lacks_tools(request):
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

    # timeout(1), docker stop and systemd send SIGTERM, whose default would leave ninja and its compilers running.
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Text of `edgellm build`: plan, progress, result.

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
# Interval of progress lines without a terminal: a log of an hour stays below 120 lines.
_QUIET_S = 30.0


class Screen:
    """Progress on stderr: a bar on a terminal, a line every half minute elsewhere. stdout holds only the result."""

    def __init__(self) -> None:
        self.console = error_console()
        self.report = BuildReport(self._print, self._progress)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._printed_s = 0.0

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_bar()
        if kind is KeyboardInterrupt:
            self._print("stopped; the same command continues from here")

    def _print(self, sentence: str) -> None:
        self._end_bar()
        self.console.print(sentence, markup=False)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def _progress(self, step: Step) -> None:
        left = f"about {format_seconds(step.eta_s)} left" if step.eta_s is not None else ""
        if not self.console.is_terminal:
            now_s = time.monotonic()
            if now_s - self._printed_s >= _QUIET_S or step.done == step.total:
                self._printed_s = now_s
                self.console.print(f"{step.done}/{step.total} {left}".rstrip(), markup=False)
            return
        if self._bar is None:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[left]}  {task.fields[what]}", markup=False),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task("", total=step.total, left="", what="")
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=step.done, total=step.total, left=left, what=step.what)


def show_intent(plan: BuildPlan, say: Callable[[str], None]) -> None:
    """Print what is going to be built, and how long it takes."""
    if plan.built is not None:
        return
    arch = ", ".join(f"sm_{a}" for a in plan.arch)
    target = f" for {arch}" if arch else ""
    say(f"building llama.cpp {plan.source.commit[:9]} with the recipe {plan.recipe.name}{target}")
    say(_cost(plan))
    for finding in plan.preflight.findings:
        if finding.verdict == "warn":
            say(f"note: {finding.sentence}" + (f" ({finding.hint})" if finding.hint else ""))


def show_plan(request: BuildRequest, plan: BuildPlan, as_json: bool) -> None:
    """Print a dry run: recipe, findings, each option with its reason, the exact commands."""
    if as_json:
        print_json(plan_document(request, plan))
        return
    out = console()
    out.print(f"board    {request.board.module} ({request.board.id})", markup=False)
    out.print(f"recipe   {plan.recipe.name}: {plan.recipe.trust}", markup=False)
    pinned = "pinned by hash" if plan.source.pinned else "not pinned"
    out.print(f"source   llama.cpp {plan.source.commit[:9]} from {plan.source.name} ({pinned})", markup=False)
    cost = _cost(plan)
    out.print(f"cost     {cost}; built already as {plan.built}" if plan.built else f"cost     {cost}", markup=False)
    out.print()
    out.print(_findings(plan))
    out.print(_options(plan))
    out.print("commands")
    for command in (plan.commands.configure, plan.commands.build):
        # soft_wrap: a command that rich broke into lines could not be copied.
        out.print(f"  {shell(command)}", markup=False, soft_wrap=True)


def _cost(plan: BuildPlan) -> str:
    jobs = plan.inputs.jobs
    return f"about {plan.minutes} min with {jobs} parallel compilers, {format_bytes(plan.recipe.disk_bytes)} of disk"


def _findings(plan: BuildPlan) -> Table:
    table = Table("", "check", "finding", box=None, pad_edge=False)
    for finding in plan.preflight.findings:
        hint = f"; {finding.hint}" if finding.hint and finding.verdict == "fail" else ""
        table.add_row(Text(finding.verdict, _COLOURS[finding.verdict]), finding.name, Text(finding.sentence + hint))
    return table


def _options(plan: BuildPlan) -> Table:
    table = Table("option", "value", "because", box=None, pad_edge=False)
    for option in (*plan.recipe.options, *plan.commands.overrides):
        table.add_row(option.name, Text(option.value, overflow="fold"), Text(option.why))
    return table


def show_result(result: BuildResult, as_json: bool) -> None:
    lines = [f"{result.engine_id} is already built and in use"]
    if result.new:
        lines = [f"{result.engine_id} is installed and in use from the next start ({format_seconds(result.took_s)})"]
        lines += [f"`edgellm engine rollback` returns to {result.previous}"] if result.previous else []
    print_result(as_json, result_document(result), lines)


def show_bindings(wheel: Path, as_json: bool) -> None:
    size_bytes = wheel.stat().st_size
    lines = [f"{wheel} ({format_bytes(size_bytes)})", f"install it: pip install {wheel}"]
    print_result(as_json, {"schema": 1, "wheel": str(wheel), "bytes": size_bytes}, lines)
