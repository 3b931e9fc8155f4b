"""`edgellm profile list | show | check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json, StateDir


def register(root: typer.Typer) -> None:
    group = typer.Typer(help="Profiles: wishes and limits for a kind of board.", no_args_is_help=True)
    group.command("list", epilog="Example: edgellm profile list")(list_profiles)
    group.command(epilog="Example: edgellm profile show orin")(show)
    group.command(epilog="Example: edgellm profile check my-board.toml")(check)
    root.add_typer(group, name="profile")


def list_profiles(json: Json = False, state_dir: StateDir = None) -> None:
    """The profiles that -p takes."""
    import os

    from edge.errors import ConfigError
    from edge.folders import folders
    from edge.profile.loader import load_profile, profile_names

    places = folders(os.environ, state_dir)
    rows: list[tuple[str, str]] = []
    for name in profile_names(places):
        try:
            rows.append((name, load_profile(name, places).summary))
        except ConfigError as error:  # one bad file must not hide the others
            rows.append((name, f"bad: {error}"))
    if json:
        from json import dumps

        print(dumps({"schema": 1, "profiles": [{"name": name, "summary": text} for name, text in rows]}, indent=1))
        return
    from edge.render.plan import columns

    print("\n".join(columns(rows)))


def show(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="name or file")],
    json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """All values of a profile, its tiers, and where each value comes from."""
    import os

    from edge.folders import folders
    from edge.profile.loader import load_profile

    profile = load_profile(name, folders(os.environ, state_dir))
    if json:
        from json import dumps

        from msgspec import to_builtins

        print(dumps({"schema": 1, **to_builtins(profile)}, indent=1))
        return
    from edge.render.profile import profile_lines

    print("\n".join(profile_lines(profile)))


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a profile in TOML")],
    json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Reads a profile wholly and says what is wrong with it (exit code 78) or that it is fine."""
    import os

    from edge.folders import folders
    from edge.profile.loader import check_file

    profile = check_file(file, folders(os.environ, state_dir))
    if json:
        from json import dumps

        print(dumps({"schema": 1, "name": profile.name, "ok": True, "values": len(profile.origins)}))
        return
    print(f"{file}: a good profile, {len(profile.origins)} values, {len(profile.tiers)} tiers")
