"""Values of a configuration with the layer each came from. Pure."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct

from edge.config.devices import DEVICE_KEYS
from edge.config.values import CONFIG_KEYS, MODEL_KEYS, SETTINGS, Config, Profile

DEFAULT = "default"


class ConfigRow(Struct, frozen=True):
    """One key with its origin. `value` is as TOML would hold it."""

    key: str
    value: Any
    origin: str


def rows(config: Config, profile: Profile) -> list[ConfigRow]:
    """Return the keys of edgellm.toml, then the models, then the settings. `profile` is resolved for the board."""
    found = [
        ConfigRow(
            key, _plain(_value(config, key)), config.origins.get("reserve" if key == "memory.reserve" else key, DEFAULT)
        )
        for key in CONFIG_KEYS
    ]
    for model in config.models:
        for key, field in MODEL_KEYS.items():
            value = getattr(model, key)
            found.append(
                ConfigRow(f"model.{model.id}.{key}", _plain(value), DEFAULT if value == field.default else model.origin)
            )
        found += (
            ConfigRow(f"model.{model.id}.set.{key}", _plain(value), model.origin) for key, value in model.set.items()
        )
    for number, device in enumerate(config.devices, 1):
        for key, field in DEVICE_KEYS.items():
            value = getattr(device, key)
            origin = DEFAULT if value == field.default else device.origin
            found.append(ConfigRow(f"device.{number}.{key}", value, origin))
    found += [
        ConfigRow(f"set.{key}", _plain(getattr(profile.preset, key)), profile.origins.get(key, DEFAULT))
        for key in SETTINGS
    ]
    return found


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def toml_value(value: object) -> str:
    """Return a value as TOML writes it; None, which TOML lacks, as (none)."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {toml_value(one)}' for key, one in value.items())} }}"
    return "(none)" if value is None else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
