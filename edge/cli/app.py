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
from typer.models import CommandInfo, TyperInfo

import edge.cli
from edge import __version__
from edge.board import nvidia
from edge.units import printable

# The page of the source tree that says more about a command, or a noun's commands; shown below each help.
PAGES = {
    "bench": "docs/numbers.md",
    "board": "docs/jetson.md",
    "build": "build/README.md",
    "chat": "docs/clients.md",
    "config": "docs/configuration.md",
    "doctor": "docs/troubleshooting.md",
    "engine": "build/README.md",
    "key": "docs/security.md",
    "load": "docs/several-models.md",
    "logs": "docs/troubleshooting.md",
    "model": "docs/models.md",
    "plan": "profiles/README.md",
    "profile": "profiles/README.md",
    "ps": "docs/several-models.md",
    "reload": "docs/configuration.md",
    "restart": "docs/troubleshooting.md",
    "rpc": "docs/rpc.md",
    "service": "systemd/README.md",
    "status": "docs/json.md",
    "stop": "systemd/README.md",
    "timeline": "docs/json.md",
    "top": "docs/telemetry.md",
    "unload": "docs/several-models.md",
    "up": "docs/jetson.md",
    "wait": "docs/jetson.md",
}
# The module of a command that has another name than it, so that only this one is imported.
MODULES = {
    **dict.fromkeys(("load", "ps", "unload"), "pool"),
    **dict.fromkeys(("logs", "reload", "restart", "status", "stop", "wait"), "running"),
}
# EX_USAGE of sysexits.h; click exits with 2, which other programs use for "nothing found".
USAGE = 64


def build(only: str | None = None) -> typer.Typer:
    """Build the whole application, or only what one command needs: importing all of them costs 0.2 s."""
    root = typer.Typer(
        name="edgellm",
        help="Turn this machine into an LLM appliance: plan, launch, warm, watch and serve llama.cpp.",
        epilog="More: README.md, docs/jetson.md and docs/glossary.md of the source",
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
    _name_pages(root)
    return root


def _name_pages(root: typer.Typer) -> None:
    """Add the page of each command to its epilog."""
    for command in root.registered_commands:
        _add_page(command, str(command.name or getattr(command.callback, "__name__", "")))
    for group in root.registered_groups:
        _add_page(group, str(group.name))
        for command in group.typer_instance.registered_commands if group.typer_instance else ():
            _add_page(command, str(group.name))


def _add_page(described: CommandInfo | TyperInfo, name: str) -> None:
    example = f"{described.epilog}\n\n" if isinstance(described.epilog, str) else ""
    described.epilog = f"{example}More: {PAGES[name]} of the source"


def nouns(only: str | None = None) -> Iterator[ModuleType]:
    """Yield every module of this package that registers commands, in the order of their names, or only a command's."""
    names = sorted(info.name for info in pkgutil.iter_modules(edge.cli.__path__))
    if only is not None:
        only = MODULES.get(only, only)
    for name in [only] if only in names else names:
        module = importlib.import_module(f"edge.cli.{name}")
        if hasattr(module, "register"):
            yield module


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code: 64 (EX_USAGE) for a wrong command line, where typer has 2."""
    nvidia.on_wait = _waits
    if any(printable(argument) != argument for argument in arguments):
        _escape_errors()
    try:
        build(arguments[0] if arguments else None)(args=arguments or ["--help"], prog_name="edgellm")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return USAGE if code == 2 else code
    return 0


def _escape_errors() -> None:
    """Show control characters in typer's own messages, which quote arguments. The import takes 40 ms."""
    from typer import rich_utils

    from edge.cli.output import SafeConsole

    rich_utils.Console = SafeConsole  # type: ignore[attr-defined]


def _waits(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgellm {__version__}")
        raise typer.Exit
