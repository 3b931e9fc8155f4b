"""`edgellm profile`: list, show and check the profiles that -p takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json, StateDir, columns, folders_of, print_result, terminal_width
from edge.config.show import toml_value
from edge.config.values import SETTINGS, Profile
from edge.units import counted, format_bytes


def register(root: typer.Typer) -> None:
    group = typer.Typer(help="List, show and check profiles: settings for a kind of board.", no_args_is_help=True)
    group.command("list", epilog="Example: edgellm profile list")(list_profiles)
    group.command(epilog="Example: edgellm profile show orin")(show)
    group.command(epilog="Example: edgellm profile check my-board.toml")(check)
    root.add_typer(group, name="profile")


def list_profiles(as_json: Json = False, state_dir: StateDir = None) -> None:
    """List the profiles that -p takes."""
    from edge.config.profile import load_profile, profile_names
    from edge.errors import ConfigError

    folders = folders_of(state_dir)
    rows: list[tuple[str, str]] = []
    for name in profile_names(folders):
        try:
            rows.append((name, load_profile(name, folders).summary))
        except ConfigError as error:  # one bad file must not hide the others
            rows.append((name, f"bad: {error}"))
    document = {"schema": 1, "profiles": [{"name": name, "summary": text} for name, text in rows]}
    print_result(as_json, document, columns(rows, width=terminal_width()), indent=1)


def show(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="name or file")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Show all values of a profile with their origin, and its tiers."""
    from msgspec import to_builtins

    from edge.config.profile import load_profile

    profile = load_profile(name, folders_of(state_dir))
    print_result(as_json, {"schema": 1, **to_builtins(profile)}, profile_lines(profile), indent=1)


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a profile in TOML")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Check a profile file. Exit code 78 when it is not valid."""
    from edge.config.profile import check_file

    profile = check_file(file, folders_of(state_dir))
    document = {"schema": 1, "name": profile.name, "ok": True, "values": len(profile.origins)}
    values, tiers = counted(len(profile.origins), "value"), counted(len(profile.tiers), "tier")
    line = f"{file}: a valid profile, {values}, {tiers}"
    print_result(as_json, document, [line], indent=None)


# Text of `edgellm profile show`.


def profile_lines(profile: Profile) -> list[str]:
    """Return the settings with their origin, then tiers and choices."""
    lines = [f"{profile.name}: {profile.summary}", f"from {profile.source}", ""]
    rows = [
        (f"{key} = {toml_value(getattr(profile.preset, key))}", profile.origins.get(key, "default")) for key in SETTINGS
    ]
    lines += columns(rows)
    for key, value in profile.sections.items():
        lines.append(f"{key} = {toml_value(value)}  {profile.origins.get(key, 'default')}")
    for tier in profile.tiers:
        upto = format_bytes(tier.memory_max_bytes) if tier.memory_max_bytes else "any size"
        names = f" ({', '.join(tier.names)})" if tier.names else ""
        values = ", ".join(f"{key} = {toml_value(value)}" for key, value in tier.values.items())
        lines += ["", f"tier {tier.name}{names}, memory up to {upto}:", f"  {values}"]
    if profile.choices:
        lines.append("")
    for choice in profile.choices:
        conditions = [
            *choice.socs,
            *choice.containers,
            *([f"{choice.gpus_min} GPU or more"] if choice.gpus_min else []),
        ]
        lines.append(f"{' or '.join(conditions) or 'anything else'} → {choice.profile}")
    return lines
