"""The configuration of this machine, with the origin of each value.

Precedence: flag > --set > EDGELLM_A__B > the user's edgellm.toml > /etc/edgellm/edgellm.toml > the user's profile >
the shipped profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, field
from msgspec.structs import replace

from edge.board.board import Board
from edge.config.devices import DeviceConfig, read_devices
from edge.config.fields import did_you_mean, flatten, nested, parse_field, read_field, read_table
from edge.config.models import check_names, read_models, with_flags
from edge.config.profile import SYSTEM_CONFIG, choose, load_profile, resolve_tier
from edge.config.values import CONFIG_KEYS, SETTINGS, Config, ModelConfig, Override, Profile, place_of
from edge.errors import ConfigError, UsageError
from edge.linux.sockets import only_this_machine
from edge.paths import Folders
from edge.resources import load_toml

# Layers of dotted keys from files, environment, --set and flags; the later layer wins.

SCHEMA = 1
KEYS = {**SETTINGS, **CONFIG_KEYS}
# Read elsewhere, so no keys of the configuration.
RESERVED_ENV = frozenset({"EDGELLM_STATE_DIR", "EDGELLM_API_KEY", "EDGELLM_DEBUG"})
_PREFIX = "EDGELLM_"
# Variables that Kubernetes injects for each Service, and Docker's links, in every container beside one called edgellm:
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_FOREIGN = re.compile(
    r"EDGELLM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?|NAME|ENV_\w+)"
)
# One setting has two spellings: a table of edgellm.toml and a key of a profile.
_SAME = {"memory.reserve": "reserve"}


class ConfigLayer(Struct, frozen=True):
    """Values of one origin. `models` and `devices` None leave those of the layers below."""

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    models: tuple[ModelConfig, ...] | None = None
    devices: tuple[DeviceConfig, ...] | None = None


def file_layer(path: Path) -> ConfigLayer | None:
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
    if type(schema) is not int or schema > SCHEMA:
        raise ConfigError(f"{source}: schema {schema!r} is newer than this edgellm knows ({SCHEMA})", "update edgellm")
    models = read_models(table.pop("model"), source) if "model" in table else None
    devices = read_devices(table.pop("device"), source, place_of) if "device" in table else None
    settings = table.pop("set", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: set wants a table, written [set]")
    values = read_table(CONFIG_KEYS, flatten(table, CONFIG_KEYS), source, place_of)
    values |= read_table(SETTINGS, settings, f"{source}: set", place_of)
    return ConfigLayer(source, _renamed(values), models, devices)


def env_layers(env: Mapping[str, str]) -> list[ConfigLayer]:
    """Return one layer a variable: EDGELLM_GATEWAY__HOLD__SECONDS=5 sets gateway.hold.seconds. Raises ConfigError."""
    layers = []
    for name in sorted(env):
        if not name.startswith(_PREFIX) or name in RESERVED_ENV or _FOREIGN.fullmatch(name):
            continue
        key = name.removeprefix(_PREFIX).lower().replace("__", ".")
        if key not in KEYS:
            hint = "a dot of a key is __ in its variable: EDGELLM_STORE__DIRS is store.dirs"
            raise ConfigError(f"environment {name}: unknown key {key}{did_you_mean(key, KEYS)}", hint)
        layers.append(
            ConfigLayer(f"env {name}", _renamed({key: parse_field(KEYS, key, env[name], f"environment {name}")}))
        )
    return layers


def foreign_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables with our prefix that Kubernetes or Docker made of a Service's name."""
    return tuple(name for name in sorted(env) if _FOREIGN.fullmatch(name))


def set_layer(settings: Iterable[str]) -> ConfigLayer:
    """Return the layer of `--set key=value`. Raises UsageError, ConfigError."""
    values: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: wants key=value", "for example --set n_ctx=8192")
        values |= _renamed({key.strip(): parse_field(KEYS, key.strip(), value, "--set")})
    return ConfigLayer("--set", values)


def flag_layer(flags: Mapping[str, object]) -> ConfigLayer:
    """Return the layer of the flags that are keys. An absent, empty or false flag sets nothing."""
    values = {}
    for key in ("profile", "listen", "engine", "insecure"):
        if flags.get(key):
            values[key] = read_field(CONFIG_KEYS, key, flags[key], "flag")
    if flags.get("args"):  # what stood behind `--`
        values["args"] = read_field(SETTINGS, "args", flags["args"], "flag")
    return ConfigLayer("flag", values)


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {_SAME.get(key, key): value for key, value in values.items()}


def load(folders: Folders, flags: Mapping[str, object], env: Mapping[str, str], system: Path = SYSTEM_CONFIG) -> Config:
    """Read every layer. `flags` by CliOption.dest, `system` is /etc/edgellm. Raises ConfigError, UsageError."""
    layers = _layers(folders, flags, env, system)
    profile_name = next(
        (str(layer.values["profile"]) for layer in reversed(layers) if "profile" in layer.values), "auto"
    )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    models: tuple[ModelConfig, ...] = ()
    devices: tuple[DeviceConfig, ...] = ()
    for layer in [*_profile_layers(load_profile(profile_name, folders, system)), *layers]:
        values |= layer.values
        origins |= dict.fromkeys(layer.values, layer.origin)
        models = models if layer.models is None else layer.models
        devices = devices if layer.devices is None else layer.devices
    models = with_flags(models, _texts(flags.get("model")))
    check_names(models)
    config = convert(nested({key: value for key, value in values.items() if key in CONFIG_KEYS}), Config)
    models = tuple(
        replace(model, set={key: with_absolute_paths(key, value) for key, value in model.set.items()})
        for model in models
    )
    overrides = {
        key: Override(with_absolute_paths(key, value), origins[key]) for key, value in values.items() if key in SETTINGS
    }
    reserve = str(values.get("reserve", config.memory.reserve))
    ignored = foreign_variables(env)
    notes = (f"made by Kubernetes or Docker, so no settings: {', '.join(ignored)}",) if ignored else ()
    memory = replace(config.memory, reserve=reserve)
    config = replace(config, models=models, devices=devices)
    return replace(config, memory=memory, overrides=overrides, origins=origins, notes=notes)


def with_absolute_paths(key: str, value: Any) -> Any:
    """Return the value of a setting; of one that names files with absolute paths: an engine runs in another folder."""
    if key in ("chat_template_file", "system_prompt_file") or (key == "mmproj" and value not in ("auto", "none")):
        return _absolute(value)
    return tuple(map(_absolute, value)) if key == "lora" else value


def _absolute(path: str) -> str:
    if not path or path.startswith("/"):
        return path
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # ~name of no user, or no home at all
        return str(Path(path).absolute())


def resolve_profile(config: Config, board: Board, folders: Folders, system: Path = SYSTEM_CONFIG) -> Profile:
    """Return the profile for this board: choice, tier and overrides applied. Raises ConfigError."""
    profile = load_profile(config.profile, folders, system)
    name = choose(profile, board)
    if name != profile.name:
        profile = replace(
            load_profile(name, folders, system), notes=(f"profile {config.profile} means {name} on this board",)
        )
    profile = replace(profile, notes=(*profile.notes, *config.notes))
    return _with_ui(with_overrides(resolve_tier(profile, board), config), config.listen)


def _with_ui(profile: Profile, listen: Sequence[str]) -> Profile:
    """Decide `ui` where nothing sets it: a page cannot send a key, so it is for this machine alone."""
    if profile.preset.ui is not None:
        return profile
    return replace(profile, preset=replace(profile.preset, ui=only_this_machine(listen)))


def with_overrides(profile: Profile, config: Config) -> Profile:
    """Lay the settings above the profile over it, for every model."""
    values: dict[str, Any] = {key: override.value for key, override in config.overrides.items()}
    origins = {key: override.origin for key, override in config.overrides.items()}
    return replace(profile, preset=replace(profile.preset, **values), origins=profile.origins | origins)


def _layers(folders: Folders, flags: Mapping[str, object], env: Mapping[str, str], system: Path) -> list[ConfigLayer]:
    """Return the layers above the profile's, lowest first."""
    paths = dict.fromkeys(folder / "edgellm.toml" for folder in (system, folders.config))
    files = [layer for layer in map(file_layer, paths) if layer is not None]
    return [*files, *env_layers(env), set_layer(_texts(flags.get("set"))), flag_layer(flags)]


def _profile_layers(profile: Profile) -> list[ConfigLayer]:
    return [ConfigLayer(profile.origins.get(key, "profile"), {key: value}) for key, value in profile.sections.items()]


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []
