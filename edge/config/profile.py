"""Profiles from TOML files: one with the name of a shipped one is laid over it; `extends` goes one level deep."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from edge.board.board import Board
from edge.config.fields import Field, did_you_mean, flatten, read_field, read_table, tables
from edge.config.values import (
    CHOICE_KEYS,
    SECTIONS,
    SETTINGS,
    TIER_KEYS,
    ModelChoice,
    Preset,
    Profile,
    Tier,
    place_of,
)
from edge.errors import ConfigError
from edge.paths import Folders, system_folders
from edge.resources import data_dir, load_toml
from edge.units import format_bytes

SCHEMA = 1
SYSTEM_CONFIG = system_folders().config
# Keys that name files of one model are no part of a profile.
PROFILE_SETTINGS = {key: field for key, field in SETTINGS.items() if not field.one_model}
PROFILE_KEYS = {**PROFILE_SETTINGS, **SECTIONS}
_SUMMARY = {"summary": Field(Annotated[str, Meta(description="one line")])}
_Files = dict[str, list[Path]]
# Tables of another kind in the same folder.
_NOT_PROFILES = frozenset({"boards", "models", "ranking"})


def load_profile(name_or_path: str, folders: Folders, system: Path = SYSTEM_CONFIG) -> Profile:
    """Load a profile by name (user's over shipped; a tier's name too) or from a file. Raises ConfigError."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return _from_file(Path(name_or_path), _files(folders, system))
    files = _files(folders, system)
    found = files.get(name_or_path)
    if found:
        return _layered(name_or_path, found, files)
    for name, layers in files.items():
        if any(name_or_path in tier_names(path) for path in layers):
            profile = _with_tiers_named(_layered(name, layers, files), name_or_path)
            if profile is not None:
                return profile
    known = profile_names(folders, system)
    raise ConfigError(
        f"no profile {name_or_path!r}{did_you_mean(name_or_path, known)}",
        f"there are {', '.join(known)}; or give a file",
    )


def profile_names(folders: Folders, system: Path = SYSTEM_CONFIG) -> tuple[str, ...]:
    """Return every name that load_profile knows, tiers' names included."""
    files = _files(folders, system)
    return tuple(sorted({*files, *(name for layers in files.values() for path in layers for name in tier_names(path))}))


def tier_names(path: Path) -> list[str]:
    """Return the names of a file's tiers; none where the file cannot be read, which its own command reports."""
    try:
        rows = _read(path).get("tier", [])
    except ConfigError:
        return []
    names = [row.get("names", []) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [name for some in names for name in some if isinstance(name, str)]


def check_file(path: Path, folders: Folders, system: Path = SYSTEM_CONFIG) -> Profile:
    """Load the profile in `path`. Raises ConfigError naming file and key."""
    return _from_file(path, _files(folders, system))


def _files(folders: Folders, system: Path) -> _Files:
    """Return the files of each profile name, lowest layer first: shipped, system, user."""
    places = [data_dir("profiles"), system / "profiles", folders.config / "profiles"]
    files: _Files = {}
    for place in dict.fromkeys(places):
        for path in sorted(place.glob("*.toml")):
            if path.stem not in _NOT_PROFILES:
                files.setdefault(path.stem, []).append(path)
    return files


def _from_file(path: Path, files: _Files) -> Profile:
    if not path.is_file():
        raise ConfigError(f"no such profile file: {path}", "`edgellm profile list` shows the named ones")
    return _layered(path.stem, [path], files)


def _layered(name: str, paths: Iterable[Path], files: _Files) -> Profile:
    profile = Profile(name, "", Preset())
    for path in paths:
        table = _read(path)
        base = table.get("extends")
        if base is not None:
            profile = _base(base, name, path, files)
        profile = _over(profile, table, path)
    return profile


def _base(base: object, name: str, path: Path, files: _Files) -> Profile:
    layers = files.get(base) if isinstance(base, str) else None
    layers = [layer for layer in layers or [] if layer != path]
    if not layers:
        raise ConfigError(f"{path}: extends {base!r}, which is no profile{did_you_mean(str(base), files)}")
    # One level: a chain of files could not be followed by reading them.
    for layer in layers:
        if "extends" in _read(layer):
            raise ConfigError(
                f"{path}: extends {base}, which itself extends {_read(layer)['extends']}", "one level is the limit"
            )
    return replace(_layered(str(base), layers, files), name=name)


def _read(path: Path) -> dict[str, Any]:
    try:
        table = load_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", "a profile is a TOML file; see profiles/README.md") from None
    schema = table.get("schema", SCHEMA)
    if type(schema) is not int or schema > SCHEMA:
        raise ConfigError(f"{path}: schema {schema!r} is newer than this edgellm knows ({SCHEMA})", "update edgellm")
    return table


def _over(profile: Profile, table: dict[str, Any], path: Path) -> Profile:
    """Lay one file over the profile below it."""
    source = str(path)
    origin = f"profile {path.stem}" if path.parent == data_dir("profiles") else f"profile {path}"
    rest = {key: value for key, value in table.items() if key not in ("schema", "summary", "extends", "tier", "use")}
    values = read_table(PROFILE_KEYS, flatten(rest, PROFILE_KEYS), source, _in_config)
    preset = {key: value for key, value in values.items() if key in SETTINGS}
    sections = {key: value for key, value in values.items() if key in SECTIONS}
    summary = read_field(_SUMMARY, "summary", table.get("summary", profile.summary), source)
    rows = {key: enumerate(tables(table.get(key, []), key, source), 1) for key in ("tier", "use")}
    tiers = tuple(_tier(row, f"{source}: tier {number}") for number, row in rows["tier"])
    choices = tuple(_choice(row, f"{source}: use {number}") for number, row in rows["use"])
    return replace(
        profile,
        summary=summary,
        preset=replace(profile.preset, **preset),
        sections=profile.sections | sections,
        tiers=tiers or tuple(_without(tier, preset) for tier in profile.tiers),
        choices=choices or profile.choices,
        origins=profile.origins | dict.fromkeys(values, origin),
        source=source,
    )


def _without(tier: Tier, preset: dict[str, Any]) -> Tier:
    """Drop the values that a higher layer sets for every tier."""
    return replace(tier, values={key: value for key, value in tier.values.items() if key not in preset})


def _tier(row: dict[str, Any], source: str) -> Tier:
    values = read_table({**TIER_KEYS, **PROFILE_SETTINGS}, row, source, _in_config)
    settings = {key: values.pop(key) for key in list(values) if key in SETTINGS}
    return Tier(memory_max_bytes=values.pop("memory_max", None), values=settings, **values)


def _choice(row: dict[str, Any], source: str) -> ModelChoice:
    values = read_table(CHOICE_KEYS, row, source, _in_config)
    if "profile" not in values:
        raise ConfigError(f"{source}: profile is missing")
    return ModelChoice(**values)


def _in_config(key: str) -> str | None:
    """Return the place of a setting that names files of one model, which a profile for many may not hold."""
    return f"edgellm.toml: {place_of(key)}" if key in SETTINGS and SETTINGS[key].one_model else None


def _with_tiers_named(profile: Profile, name: str) -> Profile | None:
    tiers = tuple(tier for tier in profile.tiers if name in tier.names)
    return replace(profile, name=name, tiers=tiers) if tiers else None


# Selection of a profile and its tier for one board. Pure.


def choose(profile: Profile, board: Board) -> str:
    """Return the profile name to use on this board: its own unless it is a list of choices. Raises ConfigError."""
    if not profile.choices:
        return profile.name
    # A Jetson's integrated GPU has no UUID.
    discrete = sum(1 for gpu in board.gpus if gpu.uuid)
    for choice in profile.choices:
        soc = not choice.socs or board.soc in choice.socs
        container = not choice.containers or board.container in choice.containers
        if soc and container and discrete >= choice.gpus_min:
            return choice.profile
    raise ConfigError(f"profile {profile.name} has no row for {board.module}", "name a profile with -p")


def resolve_tier(profile: Profile, board: Board) -> Profile:
    """Lay the tier of the board's memory over the profile. A profile without tiers is returned as it is."""
    if not profile.tiers:
        return profile
    memory = model_memory_bytes(profile, board)
    tier = next((t for t in profile.tiers if t.memory_max_bytes is None or memory <= t.memory_max_bytes), None)
    notes = profile.notes
    if tier is None:
        tier = profile.tiers[-1]
        notes = (
            *notes,
            f"{format_bytes(memory)} is more than profile {profile.name} knows: its largest tier {tier.name} is used",
        )
    return replace(
        profile,
        preset=replace(profile.preset, **tier.values),  # keys of SETTINGS
        tiers=(),
        tier=tier.name,
        origins=profile.origins | dict.fromkeys(tier.values, f"profile {profile.name}, tier {tier.name}"),
        notes=notes,
    )


def model_memory_bytes(profile: Profile, board: Board) -> int:
    """Return the memory that weights would live in: VRAM where discrete GPUs are used, else the board's."""
    vram = [gpu.memory_bytes or 0 for gpu in board.gpus if gpu.uuid]
    if board.unified_memory or profile.preset.offload == "none" or not vram:
        return board.memory_bytes
    # `none` puts the whole model on one GPU (llama.cpp, --split-mode).
    return max(vram) if profile.preset.split_mode == "none" else sum(vram)
