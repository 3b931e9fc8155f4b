"""`edgellm doctor`: checks of this machine, each with a verdict and at most one next step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from edge.cli.options import Engine, Json, Listen, Models, Profile, RootDir, Set, StateDir, given, print_json
from edge.cli.output import console
from edge.doctor.check import ORDER, Check, CheckResult
from edge.errors import UsageError


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm doctor --profile orin")(doctor)


def doctor(
    profile: Profile = None,
    model: Models = None,
    listen: Listen = None,
    set: Set = None,
    engine: Engine = None,
    state_dir: StateDir = None,
    root_dir: RootDir = None,
    fix: Annotated[bool, typer.Option("--fix", help="repair edgellm's own files; other commands are printed")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="do not measure how fast the models are read")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine for serving: every finding has a verdict and, where it matters, one next step.

    Exit code 1 when something is bad. Nothing is changed; --fix only makes edgellm's folders, closes its files to other
    users and removes its dead sockets.
    """
    from edge.doctor import doctor as fixing
    from edge.doctor.check import CheckResult, worst
    from edge.doctor.doctor import document, examine, examined_folders, read_facts

    machine = root_dir or Path("/")
    if not (machine / "proc").is_dir():
        raise UsageError(f"{machine} has no proc folder", "a copied machine has proc, sys, etc, dev and var")
    flags = given(profile=profile, model=model, listen=listen, set=set, engine=engine)
    folders = examined_folders(os.environ, state_dir)
    facts = read_facts(machine, folders, os.environ, flags, measure=not quick)
    fixed = fixing.apply(facts.leftovers) if fix else ()
    if fixed:
        facts = read_facts(machine, folders, os.environ, flags, measure=False)
    checks = examine(facts)
    if as_json:
        print_json(document(checks, fixed))
    else:
        show(checks, fixed)
    if worst(checks) is CheckResult.BAD:
        raise typer.Exit(1)


# Text of `edgellm doctor`: one line a finding, its next step below it, commands at the end.

_STYLE = {CheckResult.OK: "green", CheckResult.WARN: "yellow", CheckResult.BAD: "bold red", CheckResult.UNKNOWN: "cyan"}


def show(checks: tuple[Check, ...], fixed: tuple[str, ...]) -> None:
    """Print the findings, their summary, the commands to run, and what --fix did."""
    out = console()
    if out.is_terminal:
        out.print(findings(checks))
    else:
        for line in lines(checks):
            out.print(Text(line), soft_wrap=True)
    out.print()
    out.print(summary(checks))
    commands = list(dict.fromkeys(c.command for c in checks if c.command and c.verdict is not CheckResult.OK))
    if commands:
        out.print("\nCommands to run yourself:", markup=False)
        for command in commands:
            out.print(Text(f"  {command}"))
    for done in fixed:
        out.print(Text(f"fixed: {done}"))


def findings(checks: tuple[Check, ...]) -> Table:
    """Return the findings as a table for a terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        verdict = Text(check.verdict.value, style=_STYLE[check.verdict])
        text = Text(check.says)
        if check.next_step:
            text.append(f"\n→ {check.next_step}", style="dim")
        grid.add_row(verdict, check.name, text)
    return grid


def lines(checks: tuple[Check, ...]) -> list[str]:
    """Return the findings for a pipe: whole lines."""
    width = max((len(check.name) for check in checks), default=0)
    found = []
    for check in checks:
        found.append(f"{check.verdict.value:7}  {check.name:{width}}  {check.says}")
        if check.next_step:
            found.append(f"{'':7}  {'':{width}}  → {check.next_step}")
    return found


def summary(checks: tuple[Check, ...]) -> Text:
    """Return `1 bad, 3 warn, 20 ok`."""
    counts = [(verdict, sum(check.verdict is verdict for check in checks)) for verdict in ORDER]
    text = Text()
    for verdict, count in counts:
        if count:
            text.append(", " if text else "")
            text.append(f"{count} {verdict.value}", style=_STYLE[verdict])
    return text
