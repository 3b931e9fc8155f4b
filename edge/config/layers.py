"""Layers of dotted keys from files, environment, --set and flags; the later layer wins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.config.models import read_models
from edge.config.values import CONFIG_KEYS, ModelConfig, place_of
from edge.errors import ConfigError, UsageError
from edge.profile.fields import flatten, parse_field, read_field
from edge.profile.profile import SETTINGS
from edge.resources import load_toml

SCHEMA = 1
KEYS = {**SETTINGS, **CONFIG_KEYS}
# Read elsewhere, so no keys of the configuration.
RESERVED_ENV = frozenset({"EDGELLM_STATE_DIR", "EDGELLM_API_KEY"})
_PREFIX = "EDGELLM_"
# Variables that Kubernetes injects for each Service, and Docker's links, in every container beside one called edgellm:
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_FOREIGN = re.compile(
    r"EDGELLM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?|NAME|ENV_\w+)"
)
# One setting has two spellings: a table of edgellm.toml and a key of a profile.
_SAME = {"memory.reserve": "reserve"}


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of one origin. `models` None leaves the models of the layers below."""

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    models: tuple[ModelConfig, ...] | None = None


def file_layer(path: Path) -> Layer | None:
    """Read edgellm.toml; None when there is none. Raises ConfigError naming file and key."""
    try:
        table = load_toml(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}", "its owner and mode must let this user read it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", "edgellm.toml is a TOML file") from None
    source = str(path)
    schema = table.pop("schema", SCHEMA)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema > SCHEMA:
        raise ConfigError(f"{source}: schema {schema!r} is newer than this edgellm knows ({SCHEMA})", "update edgellm")
    models = read_models(table.pop("model"), source) if "model" in table else None
    settings = table.pop("set", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: set wants a table, written [set]")
    values = {key: read_field(CONFIG_KEYS, key, value, source, place_of) for key, value in flatten(table).items()}
    values |= {key: read_field(SETTINGS, key, value, f"{source}: set", place_of) for key, value in settings.items()}
    return Layer(source, _renamed(values), models)


def env_layers(env: Mapping[str, str]) -> list[Layer]:
    """Return one layer a variable: EDGELLM_GATEWAY__HOLD__SECONDS=5 sets gateway.hold.seconds. Raises ConfigError."""
    layers = []
    for name in sorted(env):
        if not name.startswith(_PREFIX) or name in RESERVED_ENV or _FOREIGN.fullmatch(name):
            continue
        key = name.removeprefix(_PREFIX).lower().replace("__", ".")
        layers.append(Layer(f"env {name}", _renamed({key: parse_field(KEYS, key, env[name], f"environment {name}")})))
    return layers


def foreign_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables with our prefix that Kubernetes or Docker made of a Service's name."""
    return tuple(name for name in sorted(env) if _FOREIGN.fullmatch(name))


def set_layer(settings: Iterable[str]) -> Layer:
    """Return the layer of `--set key=value`. Raises UsageError, ConfigError."""
    values: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: wants key=value", "for example --set n_ctx=8192")
        values |= _renamed({key.strip(): parse_field(KEYS, key.strip(), value, "--set")})
    return Layer("--set", values)


def flag_layer(flags: Mapping[str, object]) -> Layer:
    """Return the layer of the flags that are keys. An absent, empty or false flag sets nothing."""
    values = {}
    for key in ("profile", "listen", "engine", "insecure"):
        if flags.get(key):
            values[key] = read_field(CONFIG_KEYS, key, flags[key], "flag")
    return Layer("flag", values)


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {_SAME.get(key, key): value for key, value in values.items()}
