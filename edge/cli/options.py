"""Options that several commands share, and the folders and flags that they stand for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
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


def client_of(state_dir: Path | None) -> Client:
    """Return the client of the running edgellm that a command talks to. Raises UnavailableError; see `find`."""
    from edge.cli.client import Client, find

    return Client(find(os.environ, state_dir))
