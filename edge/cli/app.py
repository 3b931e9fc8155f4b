"""The typer application: one module a noun, each with `register(root)`; heavy imports are inside the commands."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Annotated

import typer

import edge.cli
from edge import __version__
from edge.board import nvidia

# EX_USAGE of sysexits.h; click exits with 2, which other programs use for "nothing found".
USAGE = 64


def build(only: str | None = None) -> typer.Typer:
    """Build the whole application, or only one noun: importing all of them costs 0.1 s."""
    root = typer.Typer(
        name="edgellm",
        help="Turn this machine into an LLM appliance: plan, launch, warm, watch and serve llama.cpp.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @root.callback()
    def _root(
        version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
    ) -> None:
        """Turn this machine into an LLM appliance."""

    for noun in nouns(only):
        noun.register(root)
    return root


def nouns(only: str | None = None) -> Iterator[ModuleType]:
    """Yield every module of this package that registers commands, in the order of their names."""
    names = sorted(info.name for info in pkgutil.iter_modules(edge.cli.__path__))
    for name in [only] if only in names else names:
        module = importlib.import_module(f"edge.cli.{name}")
        if hasattr(module, "register"):
            yield module


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 64 (EX_USAGE) for a wrong command line, where typer has 2."""
    nvidia.on_wait = _waits
    try:
        build(arguments[0] if arguments else None)(args=arguments or ["--help"], prog_name="edgellm")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return USAGE if code == 2 else code
    return 0


def _waits(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgellm {__version__}")
        raise typer.Exit
