"""Values of a configuration with the layer each came from. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from edge.config.values import CONFIG_KEYS, Config
from edge.profile.profile import SETTINGS, Profile

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Row:
    """One key with its origin. `value` is as TOML would hold it."""

    key: str
    value: Any
    origin: str


def rows(config: Config, profile: Profile) -> list[Row]:
    """Return the keys of edgellm.toml, then the models, then the settings. `profile` is resolved for the board."""
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


def toml_value(value: object) -> str:
    """Return a value as TOML writes it; None, which TOML lacks, as (none)."""
    return "(none)" if value is None else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
