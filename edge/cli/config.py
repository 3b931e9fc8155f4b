"""`edgellm config show`: every value with the layer that it came from."""

from __future__ import annotations

import os
from collections.abc import Iterable

import typer

from edge.cli.options import Json, Models, Profile, Set, StateDir, folders_of, given, print_json
from edge.cli.plan import columns
from edge.config.show import ConfigRow, toml_value


def register(root: typer.Typer) -> None:
    group = typer.Typer(help="Configuration: edgellm.toml, environment and flags.", no_args_is_help=True)
    group.command(epilog="Example: edgellm config show --set n_ctx=4096")(show)
    root.add_typer(group, name="config")


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
    if as_json:
        print_json({"schema": 1, "values": [to_builtins(row) for row in found]})
    else:
        typer.echo("\n".join(config_lines(found)))


# Text of `edgellm config show`.


def config_lines(rows: Iterable[ConfigRow]) -> list[str]:
    """Return `key = value   origin` lines, aligned."""
    return columns([(f"{row.key} = {toml_value(row.value)}", row.origin) for row in rows])
