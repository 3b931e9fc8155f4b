"""What the tables of models share: the console, short numbers, blocks of notes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_COLUMNS = 200


def console() -> Console:
    """Colours and the terminal's width on a terminal; plain and wide in a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def error_console() -> Console:
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPE_COLUMNS)


def warn(text: str) -> None:
    """On stderr, so that a pipe does not see it."""
    error_console().print(Text.assemble(("warning: ", "yellow"), text))


def model_id(name: str, quant: str) -> Text:
    return Text.assemble((name, "bold"), ":", (quant, "green"))


def short(count: int) -> str:
    """134515008 -> `135 M`."""
    if count >= 10**9:
        return f"{count / 1e9:.3g} B"
    return f"{count / 1e6:.3g} M" if count >= 10**6 else f"{count:,}"


def context(count: int | None) -> str:
    """8192 -> `8k`."""
    if not count:
        return "?"
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def block(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A titled list of name and words; nothing when there are none."""
    if not rows:
        return
    out.print(f"\n{title}", style="dim")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    out.print(table)
