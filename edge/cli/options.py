"""Options that several commands share, the folders and flags behind them, and the printing of results."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.cli.complete import known_boards, known_engines, known_models, known_profiles, known_settings
from edge.errors import UsageError
from edge.paths import Folders, folders
from edge.units import printable

if TYPE_CHECKING:
    from edge.cli.client import Client

StateDir = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="the instance that keeps everything under DIR")
]
Json = Annotated[bool, typer.Option("--json", help="print a JSON document")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be done and why, and stop")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME",
        help="kind of board: orin, cuda, cpu, … or a file",
        autocompletion=known_profiles,
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", metavar="[ID=]REF", help="model to serve, one or more", autocompletion=known_models),
]
Listen = Annotated[list[str] | None, typer.Option("--listen", metavar="HOST:PORT", help="address of the API")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="one value, e.g. n_ctx=8192", autocompletion=known_settings),
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", metavar="ID|PATH", help="engine id, or a llama-server", autocompletion=known_engines),
]
BoardId = Annotated[
    str | None,
    typer.Option("--board", metavar="ID", help="a board that is not here", autocompletion=known_boards),
]
RootDir = Annotated[Path | None, typer.Option("--root", metavar="DIR", help="a machine whose proc and sys lie in DIR")]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="available memory to assume")]


def folders_of(state_dir: Path | None) -> Folders:
    """Return the folders of a command: --state-dir, EDGELLM_STATE_DIR, the system's for root, the user's."""
    return folders(os.environ, state_dir)


def given(**flags: object) -> dict[str, object]:
    """Return the flags that were on the command line, as edge.config.load takes them."""
    return {name: value for name, value in flags.items() if value}


def confirm_in_use(subject: str, user: str | None, verb: str) -> None:
    """Ask on a terminal before removing what `user` uses; None is no user. Raises UsageError if not confirmed."""
    # Without a terminal there is no answer, so the command refuses: a script has to use --force.
    if user and not (sys.stdin.isatty() and typer.confirm(f"{subject} {user}: {verb} it?")):
        raise UsageError(f"{subject} {user}", "stop it first, or use --force")


def print_lines(lines: Iterable[str]) -> None:
    """Print plain lines; control characters in names and messages are shown, not obeyed."""
    typer.echo("\n".join(printable(line) for line in lines))


def print_json(document: Any, indent: int | None = 2) -> None:
    typer.echo(json.dumps(document, indent=indent))


def print_result(as_json: bool, document: Any, lines: Iterable[str], indent: int | None = 2) -> None:
    """Print the document with --json, else the lines."""
    if as_json:
        print_json(document, indent)
    else:
        print_lines(lines)


def terminal_width() -> int | None:
    """Return the columns of the terminal on stdout; None in a pipe, which takes lines of any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset(), width: int | None = None) -> list[str]:
    """Return rows aligned with two spaces between; columns of `right` are right-aligned.

    Where a row is longer than `width`, its last column is wrapped below itself, or below the row if that leaves less
    than a third of the width.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    if width is not None:  # one long cell must not push the others out of the line
        widths = [min(each, width // 3) for each in widths]
    lines = []
    for row in rows:
        padded = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in padded]
        line = "  ".join(cells).rstrip()
        if width is None or len(line) <= width:
            lines.append(line)
            continue
        head = "  ".join(cells[:-1])
        beside = width - len(head) - 2 >= width // 3
        indent = " " * (len(head) + 2 if beside else 4)
        first = f"{head}  " if beside else indent
        lines += [] if beside else [head.rstrip()]
        lines += textwrap.wrap(row[-1], width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return lines


def client_of(state_dir: Path | None) -> Client:
    """Return the client of the running edgellm that a command talks to. Raises UnavailableError; see `find`."""
    from edge.cli.client import Client, find

    return Client(find(os.environ, state_dir))
