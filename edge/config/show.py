"""Keys and values as people and tools read them: `config show`, JSON Schemas, docs/configuration.md, an example."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from edge.board.board import Board
from edge.config.devices import DEVICE_KEYS
from edge.config.fields import Field
from edge.config.models import OTHER_ENGINE_KEYS
from edge.config.profile import PROFILE_SETTINGS, SCHEMA
from edge.config.values import CHOICE_KEYS, CONFIG_KEYS, MODEL_KEYS, SECTIONS, SETTINGS, TIER_KEYS, Config, Profile
from edge.units import printable

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
        return f"{{ {', '.join(f'{toml_value(key)} = {toml_value(one)}' for key, one in value.items())} }}"
    # Of the characters that JSON leaves as they are, TOML has no DEL in its strings.
    return "(none)" if value is None else json.dumps(_plain(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# Published forms of the keys.

_INTRODUCTION = """# Configuration

Written by `python -m tests.config.publish` from the keys themselves. Later wins: shipped profile, your profile,
`/etc/edgellm/edgellm.toml`, your `edgellm.toml`, environment, `--set`, flags. `edgellm config show` prints every value
with its origin.

The environment has a variable for each key: `EDGELLM_GATEWAY__HOLD__SECONDS=5` is `gateway.hold.seconds`,
`EDGELLM_N_CTX=8192` is `n_ctx`; a list is `a,b` or `["a", "b"]`. Sizes are bytes, or text such as `"512MiB"`.

For editors and other tools there is a JSON Schema of the file: `profiles/edgellm.schema.json`.
"""


# For keys whose default is absent or would be refused.
_EXAMPLES = {
    "id": "chat",
    "ref": "NAME:Q5_K_M",
    "warm_at": "08:00",
    "command": ("whisper-server", "--port", "{port}"),
    "memory": "1.5GiB",
    "max_watts": 25.0,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "rpc": "10.0.0.2:50052",
    "interface": "eth1",
}

_MODELS = """A key of the next table that is marked "of one model" names files of that model: no profile has it, and it
may also stand directly in `[[model]]`. `args` takes any option of `llama-server --help` that edgellm does not set;
so does `edgellm up -- OPTIONS`, for every model. `edgellm plan -v` shows the whole command line.

```toml
[[model]]
ref = "Qwen3.5-4B:Q5_K_M"
args = ["--n-cpu-moe", "12"]
set = { n_ctx = 16384, reasoning = "off", temperature = 0.6 }
```
"""


def schema() -> dict[str, Any]:
    """Return the JSON Schema 2020-12 of one profile file, for editors and other tools."""
    properties = {
        "summary": {"type": "string", "description": "one line"},
        "extends": {"type": "string", "description": "another profile, which may not extend a third"},
        **_table({**PROFILE_SETTINGS, **SECTIONS})["properties"],
        "tier": {"type": "array", "items": _table({**TIER_KEYS, **PROFILE_SETTINGS})},
        "use": {"type": "array", "items": {**_table(CHOICE_KEYS), "required": ["profile"]}},
    }
    return _document("edgellm profile", properties)


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema 2020-12 of edgellm.toml, with the keys of one model's table."""
    model = _table({**MODEL_KEYS, **{key: field for key, field in SETTINGS.items() if field.one_model}})
    model["properties"]["set"] = _table(SETTINGS) | {"description": "settings of this model"}
    # Either a file for llama.cpp, or another engine: `edge.config.models` refuses a mixture with a sentence.
    mixed = [{"required": [key]} for key in OTHER_ENGINE_KEYS]
    model["oneOf"] = [
        {"required": ["ref"], "not": {"anyOf": mixed}},
        {"required": ["id", "command", "memory"], "not": {"required": ["ref"]}},
    ]
    properties = {
        **_table(CONFIG_KEYS)["properties"],
        "set": _table(SETTINGS) | {"description": "settings of every model"},
        "model": {"type": "array", "items": model},
        "device": {"type": "array", "items": _table(DEVICE_KEYS) | {"required": ["rpc"]}},
    }
    return _document("edgellm.toml", properties)


def _document(title: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "additionalProperties": False,
        "properties": {"schema": {"const": SCHEMA}, **properties},
    }


def reference() -> str:
    """Return docs/configuration.md."""
    parts = [
        _INTRODUCTION,
        _section("edgellm.toml", CONFIG_KEYS),
        _section("`[[model]]`, one table a model", MODEL_KEYS),
        _MODELS,
        _section("`[[device]]`, one table an rpc-server (docs/rpc.md)", DEVICE_KEYS),
        _section("Settings: `[set]` for every model, `set = {…}` in `[[model]]`, `--set`, a profile", SETTINGS),
    ]
    return "\n".join(parts)


def example(profile: Profile, board: Board) -> str:
    """Return edgellm.toml with every key as a comment, at its value for this board. `profile` is resolved for it."""
    tier = f", tier {profile.tier}" if profile.tier else ""
    lines = [
        printable(f"# edgellm.toml for {board.module}: profile {profile.name}{tier}."),
        "# Every line is optional. `edgellm config check` checks this file, `edgellm config show` prints what counts.",
        f"schema = {SCHEMA}",
        "",
    ]
    table = ""
    for key, field in CONFIG_KEYS.items():
        section, _, name = key.rpartition(".")
        if section != table:
            table = section
            lines += [f"[{section}]"]
        value = profile.sections.get(key, profile.preset.reserve if key == "memory.reserve" else field.default)
        lines += [*_commented(name, field, value), ""]
    lines += ["# Settings of every model; `set = { … }` in [[model]] has those of one.", "[set]"]
    for key, field in SETTINGS.items():
        lines += _commented(key, field, getattr(profile.preset, key))
    lines += ["", "# One table a model. `edgellm model list` shows the models that can be served.", "#[[model]]"]
    for key, field in MODEL_KEYS.items():
        if key not in OTHER_ENGINE_KEYS:
            lines += _commented(key, field, _EXAMPLES.get(key, field.default))
    lines += ["", "# Another engine than llama.cpp, in a table of its own.", "#[[model]]", '#id = "ears"']
    for key in OTHER_ENGINE_KEYS:
        lines += _commented(key, MODEL_KEYS[key], _EXAMPLES.get(key, MODEL_KEYS[key].default))
    lines += ["", "# One table an rpc-server that may hold layers (docs/rpc.md).", "#[[device]]"]
    for key, field in DEVICE_KEYS.items():
        lines += _commented(key, field, _EXAMPLES.get(key, field.default))

    return "\n".join(lines) + "\n"


def _commented(name: str, field: Field, value: object) -> list[str]:
    value = _EXAMPLES.get(name, 1.0) if value is None else value
    return [f"# {_help(field)}", f"#{name} = {toml_value(value)}"]


def _table(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the JSON Schema of a table; a dotted key is one of a table in it."""
    table: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for key, field in fields.items():
        *parents, name = key.split(".")
        inner = table
        for parent in parents:
            inner = inner["properties"].setdefault(parent, _table({}))
        inner["properties"][name] = _field(field)
    return table


def _field(field: Field) -> dict[str, Any]:
    """Return the JSON Schema of one key, without null, which TOML lacks; a size may be text, a word a number."""
    found = msgspec.json.schema(field.type)
    if "anyOf" in found:
        found |= next(one for one in found.pop("anyOf") if one["type"] != "null")
    found.pop("title", None)
    if field.kind == "size":
        found["type"] = ["integer", "string"]
    if field.kind == "words":
        found["items"]["type"] = ["string", "number"]
    return found


def _section(title: str, fields: Mapping[str, Field]) -> str:
    rows = [f"| `{key}` | `{toml_value(field.default)}` | {_help(field)} |" for key, field in fields.items()]
    return "\n".join([f"## {title}", "", "| key | default | |", "|---|---|---|", *rows, ""])


def _help(field: Field) -> str:
    """Return the help, with the choices of a key that has some."""
    base = field.type.__origin__
    choices = ", ".join(f"`{one}`" for one in get_args(base)) if get_origin(base) is Literal else ""
    choices = choices or ("of one model" if field.one_model else "")
    return f"{field.help} ({choices})" if choices else field.help
