"""TOML → Profile. A user's profile of a shipped name lies over the shipped one; `extends` goes one level deep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge.errors import ConfigError
from edge.folders import Folders, system_folders
from edge.profile.fields import Field, did_you_mean, flatten, read_field
from edge.profile.profile import Choice, Profile, Tier, Wishes
from edge.profile.settings import SECTIONS, SETTINGS
from edge.resources import data_dir, load_toml

SCHEMA = 1
SYSTEM_CONFIG = system_folders().config
TIER_FIELDS = {
    "name": Field("text", "name of the tier"),
    "memory_max": Field("size", "boards up to this memory", minimum=1),
    "names": Field("texts", "profile names that mean this tier"),
}
CHOICE_FIELDS = {
    "profile": Field("text", "profile to use"),
    "socs": Field("texts", "systems on chip, e.g. Orin"),
    "containers": Field("texts", "containers, e.g. wsl2"),
    "gpus_min": Field("integer", "at least so many discrete GPUs", minimum=0),
}
_Files = dict[str, list[Path]]
# Tables of another kind in the same folder.
_NOT_PROFILES = frozenset({"boards", "models", "ranking"})


def load_profile(name_or_path: str, folders: Folders, system: Path = SYSTEM_CONFIG) -> Profile:
    """By name (user's over shipped; a tier's name too) or from a file. Raises ConfigError."""
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
    """Every name that load_profile knows, tiers' names included."""
    files = _files(folders, system)
    return tuple(sorted({*files, *(name for layers in files.values() for path in layers for name in tier_names(path))}))


def tier_names(path: Path) -> list[str]:
    """Names that a file's tiers answer to; none where the file cannot be read: that is its own command's fault."""
    try:
        rows = _read(path).get("tier", [])
    except ConfigError:
        return []
    names = (
        [name for row in rows if isinstance(row, dict) for name in row.get("names", [])]
        if isinstance(rows, list)
        else []
    )
    return [name for name in names if isinstance(name, str)]


def check_file(path: Path, folders: Folders, system: Path = SYSTEM_CONFIG) -> Profile:
    """The profile in `path`, wholly read. Raises ConfigError naming file and key."""
    return _from_file(path, _files(folders, system))


def _files(folders: Folders, system: Path) -> _Files:
    """Profile name → its files, lowest layer first: shipped, system, user."""
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
    profile = Profile(name, "", Wishes())
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
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ConfigError(f"{path}: schema {schema!r} is newer than this edgellm knows ({SCHEMA})", "update edgellm")
    return table


def _over(profile: Profile, table: dict[str, Any], path: Path) -> Profile:
    """One file over what lies below."""
    source = str(path)
    origin = f"profile {path.stem}" if path.parent == data_dir("profiles") else f"profile {path}"
    rest = {key: value for key, value in table.items() if key not in ("schema", "summary", "extends", "tier", "use")}
    values = _values(flatten(rest), source, {**SETTINGS, **SECTIONS})
    wishes = {key: value for key, value in values.items() if key in SETTINGS}
    sections = {key: value for key, value in values.items() if key in SECTIONS}
    summary = read_field(
        {"summary": Field("text", "one line")}, "summary", table.get("summary", profile.summary), source
    )
    tiers = tuple(_tier(row, f"{source}: tier {index + 1}") for index, row in enumerate(_rows(table, "tier", source)))
    choices = tuple(_choice(row, f"{source}: use {index + 1}") for index, row in enumerate(_rows(table, "use", source)))
    return replace(
        profile,
        summary=str(summary),
        wishes=replace(profile.wishes, **wishes),
        sections=profile.sections | sections,
        tiers=tiers or tuple(_without(tier, wishes) for tier in profile.tiers),
        choices=choices or profile.choices,
        origins=profile.origins | dict.fromkeys(values, origin),
        source=source,
    )


def _without(tier: Tier, wishes: dict[str, Any]) -> Tier:
    """A tier of a lower layer does not override what a higher layer sets for all."""
    return replace(tier, values={key: value for key, value in tier.values.items() if key not in wishes})


def _rows(table: dict[str, Any], key: str, source: str) -> list[dict[str, Any]]:
    rows = table.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{source}: {key} wants tables, written [[{key}]]")
    return rows


def _tier(row: dict[str, Any], source: str) -> Tier:
    fields = {**TIER_FIELDS, **SETTINGS}
    values = _values(row, source, fields)
    settings: dict[str, object] = {key: value for key, value in values.items() if key in SETTINGS}
    memory_max, names = values.get("memory_max"), values.get("names", ())
    return Tier(
        name=str(values.get("name", "")),
        memory_max_bytes=memory_max if isinstance(memory_max, int) else None,
        names=tuple(str(name) for name in names) if isinstance(names, tuple) else (),
        values=settings,
    )


def _choice(row: dict[str, Any], source: str) -> Choice:
    values = _values(row, source, CHOICE_FIELDS)
    if "profile" not in values:
        raise ConfigError(f"{source}: profile is missing")
    return Choice(**values)


def _values(flat: dict[str, Any], source: str, fields: dict[str, Field]) -> dict[str, Any]:
    return {key: read_field(fields, key, value, source) for key, value in flat.items()}


def _with_tiers_named(profile: Profile, name: str) -> Profile | None:
    tiers = tuple(tier for tier in profile.tiers if name in tier.names)
    return replace(profile, name=name, tiers=tiers) if tiers else None
