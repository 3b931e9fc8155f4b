"""The consoles of tables on stdout and stderr, short numbers, blocks of notes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

# A pipe has no width: wide enough that names are not cut.
_PIPE_COLUMNS = 200


def console() -> Console:
    """Return the console of stdout: colours and the width of a terminal; plain and wide in a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


def error_console() -> Console:
    """Return the console of stderr."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPE_COLUMNS)


def warn(text: str) -> None:
    """Print a warning on stderr, which a pipe does not see."""
    error_console().print(Text.assemble(("warning: ", "yellow"), text))


def model_id(name: str, quant: str) -> Text:
    return Text.assemble((name, "bold"), ":", (quant, "green"))


def short(count: int) -> str:
    """Return 134515008 as `135 M`."""
    if count >= 10**9:
        return f"{count / 1e9:.3g} B"
    return f"{count / 1e6:.3g} M" if count >= 10**6 else f"{count:,}"


def context(count: int | None) -> str:
    """Return 8192 as `8k`."""
    if not count:
        return "?"
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"


def block(out: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a titled list of names and texts; nothing without rows."""
    if not rows:
        return
    out.print(f"\n{title}", style="dim")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    out.print(table)
