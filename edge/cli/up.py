"""`up` for --help and completion; running it goes through edge.launch (edge.cli.main hands it over before typer)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.options import UP, Option

HELP = {option.dest: option for option in UP}


def _option(name: str) -> Option:
    return HELP[name]


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm up -p orin -m Qwen3.5-4B:Q5_K_M --yes")(up)


def up(
    profile: Annotated[
        str | None, typer.Option("--profile", "-p", metavar="NAME", help=_option("profile").help)
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="[ID=]REF", help=_option("model").help)
    ] = None,
    listen: Annotated[
        list[str] | None, typer.Option("--listen", metavar="HOST:PORT", help=_option("listen").help)
    ] = None,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_option("set").help)] = None,
    engine: Annotated[str | None, typer.Option("--engine", metavar="ID|PATH", help=_option("engine").help)] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help=_option("state_dir").help)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help=_option("yes").help)] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help=_option("insecure").help)] = False,
    json: Annotated[bool, typer.Option("--json", help=_option("json").help)] = False,
) -> None:
    """Plan, launch, warm and serve on one address until Ctrl-C or `edgellm stop`."""
    raise AssertionError("edge.cli.main hands `up` to edge.launch")
