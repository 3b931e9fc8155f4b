"""Every value of a configuration with the layer that it came from. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge.config.keys import CONFIG_KEYS
from edge.config.values import Config
from edge.profile.profile import Profile
from edge.profile.settings import SETTINGS

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Row:
    """`value` is what TOML would hold."""

    key: str
    value: Any
    origin: str


def rows(config: Config, profile: Profile) -> list[Row]:
    """edgellm.toml's keys, then the models, then the profile's settings for this board. `profile` is settled."""
    found = [
        Row(
            key, _plain(_value(config, key)), config.origins.get("reserve" if key == "memory.reserve" else key, DEFAULT)
        )
        for key in CONFIG_KEYS
    ]
    for model in config.models:
        found += [
            Row(f"model.{model.id}.ref", model.ref, model.origin),
            *(Row(f"model.{model.id}.set.{key}", _plain(value), model.origin) for key, value in model.set.items()),
        ]
    found += [
        Row(f"set.{key}", _plain(getattr(profile.wishes, key)), profile.origins.get(key, DEFAULT)) for key in SETTINGS
    ]
    return found


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
