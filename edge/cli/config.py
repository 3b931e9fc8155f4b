"""`edgellm config show`: every value and the layer that it came from."""

from __future__ import annotations

from typing import Annotated

import typer

from edge.cli.options import Json, StateDir


def register(root: typer.Typer) -> None:
    group = typer.Typer(help="Configuration: edgellm.toml, environment and flags.", no_args_is_help=True)
    group.command(epilog="Example: edgellm config show --set n_ctx=4096")(show)
    root.add_typer(group, name="config")


def show(
    profile: Annotated[str | None, typer.Option("--profile", "-p", metavar="NAME", help="kind of board")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", metavar="[ID=]REF", help="model to serve")] = None,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="set one value")] = None,
    json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Every value that would be used here, with its origin."""
    import os

    from edge.board.probe import probe
    from edge.config import load, settle
    from edge.config.show import rows
    from edge.folders import folders

    places = folders(os.environ, state_dir)
    flags: dict[str, object] = {"profile": profile, "model": model or (), "set": set or ()}
    config = load(places, {name: value for name, value in flags.items() if value}, os.environ)
    found = rows(config, settle(config, probe(), places))
    if json:
        from json import dumps

        from msgspec import to_builtins

        print(dumps({"schema": 1, "values": [to_builtins(row) for row in found]}, indent=1))
        return
    from edge.render.config import config_lines

    print("\n".join(config_lines(found)))
