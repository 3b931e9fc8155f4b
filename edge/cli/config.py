"""`edgellm config`: write a commented edgellm.toml, check one, show every value with its origin."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import (
    Json,
    Models,
    Profile,
    Set,
    StateDir,
    columns,
    folders_of,
    given,
    print_result,
    terminal_width,
)
from edge.config.show import ConfigRow, toml_value
from edge.errors import UsageError
from edge.units import counted


def register(root: typer.Typer) -> None:
    group = typer.Typer(help="Write, check and show the configuration.", no_args_is_help=True)
    group.command(epilog="Example: edgellm config init -p orin")(init)
    group.command(epilog="Example: edgellm config check /etc/edgellm/edgellm.toml")(check)
    group.command(epilog="Example: edgellm config show --set n_ctx=4096")(show)
    root.add_typer(group, name="config")


def init(
    profile: Profile = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="print it instead of writing the file")] = False,
    state_dir: StateDir = None,
) -> None:
    """Write edgellm.toml with every key as a comment, at its value for this board. An existing file stays."""
    from edge.board.probe import probe
    from edge.config import load, resolve_profile
    from edge.config.show import example
    from edge.linux.files import write_atomic

    folders, board = folders_of(state_dir), probe()
    text = example(resolve_profile(load(folders, given(profile=profile), os.environ), board, folders), board)
    path = folders.config / "edgellm.toml"
    if stdout:
        typer.echo(text, nl=False)
        return
    if path.exists():
        raise UsageError(f"{path} exists already", "`edgellm config init --stdout` prints a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text, 0o644)
    typer.echo(f"wrote {path}; `edgellm config check` checks it after an edit")


def check(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="another file than the one in use")] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Check edgellm.toml, the environment and the profile. Exit code 78 when one is not valid."""
    from edge.board.probe import probe
    from edge.config import load, resolve_profile

    folders = folders_of(state_dir)
    if file is not None:
        # The loader reads folders, so the file has to have the name that it looks for.
        if file.name != "edgellm.toml" or not file.is_file():
            raise UsageError(f"{file} is not a file called edgellm.toml", "edgellm config check PATH/edgellm.toml")
        folders = folders._replace(config=file.parent.absolute())
    config = load(folders, {}, os.environ)
    profile = resolve_profile(config, probe(), folders)
    document = {"schema": 1, "ok": True, "profile": profile.name, "values": len(config.origins)}
    values, models = counted(len(config.origins), "value"), counted(len(config.models), "model")
    line = f"valid: {values}, {models}, profile {profile.name}"
    print_result(as_json, document, [line], indent=None)


def show(
    profile: Profile = None, model: Models = None, set: Set = None, as_json: Json = False, state_dir: StateDir = None
) -> None:
    """Show every value that would be used, with its origin."""
    from msgspec import to_builtins

    from edge.board.probe import probe
    from edge.config import load, resolve_profile
    from edge.config.show import rows

    folders = folders_of(state_dir)
    config = load(folders, given(profile=profile, model=model, set=set), os.environ)
    found = rows(config, resolve_profile(config, probe(), folders))
    print_result(as_json, {"schema": 1, "values": to_builtins(found)}, config_lines(found, terminal_width()))


# Text of `edgellm config show`.


def config_lines(rows: Iterable[ConfigRow], width: int | None = None) -> list[str]:
    """Return `key = value   origin` lines, aligned; `width` is the terminal's."""
    return columns([(f"{row.key} = {toml_value(row.value)}", row.origin) for row in rows], width=width)
