"""`up` for --help and completion; edge.cli.main hands a real `up` to edge.daemon.launch before typer is imported."""

from __future__ import annotations

from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from edge.cli.complete import known_engines, known_models, known_profiles, known_settings
from edge.daemon.options import DESCRIPTION, UP, CliOption

# Options of `up` whose values exist on this machine.
_COMPLETIONS = {
    "profile": known_profiles,
    "model": known_models,
    "set": known_settings,
    "engine": known_engines,
}


def register(root: typer.Typer) -> None:
    root.command("up", help=DESCRIPTION, epilog="Example: edgellm up -p orin -m Qwen3.5-4B:Q5_K_M --yes")(command())


def command() -> Any:
    """Return a function with one parameter per option of the table; typer makes its command from the signature."""

    def up(**_: Any) -> None:
        raise AssertionError("edge.cli.main hands `up` to edge.daemon.launch")

    parameters = [_parameter(option) for option in UP]
    up.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    up.__annotations__ = {each.name: each.annotation for each in parameters}
    return up


def _parameter(option: CliOption) -> Parameter:
    kind: Any = list[str] if option.many else Path if option.dest == "state_dir" else str
    typed = bool if option.metavar is None else kind | None
    shown = typer.Option(
        *option.names, metavar=option.metavar, help=option.help, autocompletion=_COMPLETIONS.get(option.dest)
    )
    default = False if option.metavar is None else None
    return Parameter(option.dest, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, shown])
