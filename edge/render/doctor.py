"""Text of `edgellm doctor`: one line a finding, its next step below it, commands at the end."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from edge.doctor.check import ORDER, Check, Verdict
from edge.render.common import console

_STYLE = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.BAD: "bold red", Verdict.UNKNOWN: "cyan"}


def show(checks: tuple[Check, ...], fixed: tuple[str, ...]) -> None:
    out = console()
    if out.is_terminal:
        out.print(findings(checks))
    else:
        for line in lines(checks):
            out.print(Text(line), soft_wrap=True)
    out.print()
    out.print(summary(checks))
    commands = list(dict.fromkeys(c.command for c in checks if c.command and c.verdict is not Verdict.OK))
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
