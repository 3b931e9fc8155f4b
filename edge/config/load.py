"""The configuration of this machine, with the origin of each value.

Precedence: flag > --set > EDGELLM_A__B > the user's edgellm.toml > /etc/edgellm/edgellm.toml > the user's profile >
the shipped profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import convert

from edge.board.board import Board
from edge.config.layers import Layer, env_layers, file_layer, flag_layer, foreign_variables, set_layer
from edge.config.models import check_names, with_flags
from edge.config.values import CONFIG_KEYS, Config, MemoryConfig, ModelConfig, Override
from edge.folders import Folders
from edge.profile.fields import nested
from edge.profile.loader import SYSTEM_CONFIG, load_profile
from edge.profile.profile import SETTINGS, Profile
from edge.profile.resolve import choose, resolve_tier


def load(folders: Folders, flags: Mapping[str, object], env: Mapping[str, str], system: Path = SYSTEM_CONFIG) -> Config:
    """Read every layer. `flags` by CliOption.dest, `system` is /etc/edgellm. Raises ConfigError, UsageError."""
    layers = _layers(folders, flags, env, system)
    profile_name = next(
        (str(layer.values["profile"]) for layer in reversed(layers) if "profile" in layer.values), "auto"
    )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    models: tuple[ModelConfig, ...] = ()
    for layer in [*_profile_layers(load_profile(profile_name, folders, system)), *layers]:
        values |= layer.values
        origins |= dict.fromkeys(layer.values, layer.origin)
        models = models if layer.models is None else layer.models
    models = with_flags(models, _texts(flags.get("model")))
    check_names(models)
    config = convert(nested({key: value for key, value in values.items() if key in CONFIG_KEYS}), Config)
    overrides = {key: Override(value, origins[key]) for key, value in values.items() if key in SETTINGS}
    reserve = str(values.get("reserve", config.memory.reserve))
    ignored = foreign_variables(env)
    notes = (f"made by Kubernetes or Docker, so no settings: {', '.join(ignored)}",) if ignored else ()
    memory = MemoryConfig(reserve)
    return replace(config, models=models, memory=memory, overrides=overrides, origins=origins, notes=notes)


def resolve_profile(config: Config, board: Board, folders: Folders, system: Path = SYSTEM_CONFIG) -> Profile:
    """Return the profile for this board: choice, tier and overrides applied. Raises ConfigError."""
    profile = load_profile(config.profile, folders, system)
    name = choose(profile, board)
    if name != profile.name:
        profile = replace(
            load_profile(name, folders, system), notes=(f"profile {config.profile} means {name} on this board",)
        )
    profile = replace(profile, notes=(*profile.notes, *config.notes))
    return with_overrides(resolve_tier(profile, board), config)


def with_overrides(profile: Profile, config: Config) -> Profile:
    """Lay the settings above the profile over it, for every model."""
    values: dict[str, Any] = {key: override.value for key, override in config.overrides.items()}
    origins = {key: override.origin for key, override in config.overrides.items()}
    return replace(profile, wishes=replace(profile.wishes, **values), origins=profile.origins | origins)


def _layers(folders: Folders, flags: Mapping[str, object], env: Mapping[str, str], system: Path) -> list[Layer]:
    """Return the layers above the profile's, lowest first."""
    paths = dict.fromkeys(folder / "edgellm.toml" for folder in (system, folders.config))
    files = [layer for layer in map(file_layer, paths) if layer is not None]
    return [*files, *env_layers(env), set_layer(_texts(flags.get("set"))), flag_layer(flags)]


def _profile_layers(profile: Profile) -> list[Layer]:
    return [Layer(profile.origins.get(key, "profile"), {key: value}) for key, value in profile.sections.items()]


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []
