"""The typer application: one module a noun, each with `register(root)`. What is heavy is imported inside commands."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated

import typer

import edge.cli
from edge import __version__

USAGE = 64


def build(only: str | None = None) -> typer.Typer:
    """The whole application, or (`only`) as much of it as one noun needs: importing all of them costs 0.1 s."""
    root = typer.Typer(
        name="edgellm",
        help="Turns this machine into an LLM appliance: plan, launch, warm, watch and serve llama.cpp.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @root.callback()
    def _root(
        version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
    ) -> None:
        """Turns this machine into an LLM appliance."""

    for noun in nouns(only):
        noun.register(root)
    return root


def nouns(only: str | None = None) -> Iterator[ModuleType]:
    """Every module beside this one that registers commands, in the order of their names."""
    names = sorted(info.name for info in pkgutil.iter_modules(edge.cli.__path__))
    for name in [only] if only in names else names:
        module = importlib.import_module(f"edge.cli.{name}")
        if hasattr(module, "register"):
            yield module


def run(arguments: list[str]) -> int:
    """The exit code. typer says 2 for a wrong command line; ours is 64 (EX_USAGE)."""
    try:
        build(arguments[0] if arguments else None)(args=arguments or ["--help"], prog_name="edgellm")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return USAGE if code == 2 else code
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgellm {__version__}")
        raise typer.Exit
