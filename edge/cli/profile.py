"""`edgellm profile`: list, show and check the profiles that -p takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json, StateDir, folders_of, print_json


def register(root: typer.Typer) -> None:
    group = typer.Typer(help="Profiles: settings and limits for a kind of board.", no_args_is_help=True)
    group.command("list", epilog="Example: edgellm profile list")(list_profiles)
    group.command(epilog="Example: edgellm profile show orin")(show)
    group.command(epilog="Example: edgellm profile check my-board.toml")(check)
    root.add_typer(group, name="profile")


def list_profiles(as_json: Json = False, state_dir: StateDir = None) -> None:
    """List the profiles that -p takes."""
    from edge.errors import ConfigError
    from edge.profile.loader import load_profile, profile_names
    from edge.render.plan import columns

    folders = folders_of(state_dir)
    rows: list[tuple[str, str]] = []
    for name in profile_names(folders):
        try:
            rows.append((name, load_profile(name, folders).summary))
        except ConfigError as error:  # one bad file must not hide the others
            rows.append((name, f"bad: {error}"))
    if as_json:
        print_json({"schema": 1, "profiles": [{"name": name, "summary": text} for name, text in rows]}, indent=1)
    else:
        typer.echo("\n".join(columns(rows)))


def show(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="name or file")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Show all values of a profile with their origin, and its tiers."""
    from msgspec import to_builtins

    from edge.profile.loader import load_profile
    from edge.render.profile import profile_lines

    profile = load_profile(name, folders_of(state_dir))
    if as_json:
        print_json({"schema": 1, **to_builtins(profile)}, indent=1)
    else:
        typer.echo("\n".join(profile_lines(profile)))


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a profile in TOML")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Check a profile file. Exit code 78 when it is not valid."""
    from edge.profile.loader import check_file

    profile = check_file(file, folders_of(state_dir))
    if as_json:
        print_json({"schema": 1, "name": profile.name, "ok": True, "values": len(profile.origins)}, indent=None)
    else:
        typer.echo(f"{file}: a valid profile, {len(profile.origins)} values, {len(profile.tiers)} tiers")
