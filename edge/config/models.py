"""Models from `[[model]]` tables and `-m [ID=]REF`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from edge.config.fields import read_table, tables
from edge.config.values import MODEL_KEYS, SETTINGS, ModelConfig, place_of
from edge.errors import ConfigError, UsageError
from edge.models.quant import public_name

# Keys of an engine beside llama.cpp.
OTHER_ENGINE_KEYS = ("command", "memory", "gpu_memory", "ready", "routes", "env")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*")  # part of paths and of socket names
# As on Hugging Face and OpenRouter: owner/name. Only a name in requests and in lists, so it may hold slashes.
_ALIAS = re.compile(rf"{_ID.pattern}(/{_ID.pattern})*")
_TIME = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]")
# Quantizations that may follow the last colon of a name: Q5_K_M, IQ4_XS, UD-Q4_K_XL, MXFP4, F16, BF16.
_QUANT = re.compile(r"(UD-)?(I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|B?F(16|32))", re.IGNORECASE)


def read_models(rows: object, source: str) -> tuple[ModelConfig, ...]:
    """Read the `[[model]]` tables. Raises ConfigError naming file and key."""
    return tuple(
        _model(row, f"{source}: model {number}") for number, row in enumerate(tables(rows, "model", source), 1)
    )


def _model(row: dict[str, Any], source: str) -> ModelConfig:
    own = row.get("set", {})
    if not isinstance(own, dict):
        raise ConfigError(f"{source}: set wants a table, written set = {{ n_ctx = 8192 }}")
    direct = {key: value for key, value in row.items() if key in SETTINGS and SETTINGS[key].one_model}
    rest = {key: value for key, value in row.items() if key != "set" and key not in direct}
    values = read_table(MODEL_KEYS, rest, source, place_of)
    settings = read_table(SETTINGS, own, f"{source}: set", place_of) | read_table(SETTINGS, direct, source, place_of)
    if "command" in values:
        _check_command(values, source)
    elif not values.get("ref"):
        raise ConfigError(f"{source}: ref is missing", 'write ref = "NAME:Q5_K_M", a path or a source')
    elif found := [key for key in OTHER_ENGINE_KEYS if key in values]:
        raise ConfigError(
            f"{source}: {found[0]} is for a model with command", f"{found[0]}: {MODEL_KEYS[found[0]].help}"
        )
    values.setdefault("id", id_of(values["ref"]) if "ref" in values else "")
    if values.get("warm_at") and not _TIME.fullmatch(values["warm_at"]):
        raise ConfigError(f"{source}: warm_at wants a time like 08:00, got {values['warm_at']!r}")
    return ModelConfig(**values, set=settings, origin=source)


def _check_command(values: dict[str, Any], source: str) -> None:
    """Raise ConfigError for an engine that cannot be started, observed or planned by what its table states."""
    command = values["command"]
    if values.get("ref"):
        raise ConfigError(
            f"{source}: ref and command exclude each other", "llama.cpp serves ref, command names a program"
        )
    if not values.get("id"):
        raise ConfigError(f"{source}: id is missing", 'a model with command has no name of its own: write id = "voice"')
    if not command or not command[0]:
        raise ConfigError(f"{source}: command is empty", 'write command = ["whisper-server", "--port", "{port}"]')
    if not any("{port}" in word for word in command[1:]):
        raise ConfigError(
            f"{source}: command has no {{port}}", 'its port is chosen at each start: write "--port", "{port}"'
        )
    if not values.get("memory"):
        raise ConfigError(
            f"{source}: memory is missing",
            'write memory = "1.5GiB", about what it takes: it is measured at the first start',
        )
    for path in (values.get("ready", "/health"), *values.get("routes", ())):
        if not path.startswith("/") or not path.isprintable() or " " in path:
            raise ConfigError(f"{source}: {path!r} is no path", "write it like /v1/audio/transcriptions")
    for name in values.get("env", {}):
        if not name or set(name) & {"=", "\0"}:  # execve(2) takes none, and a reload would end on it
            raise ConfigError(
                f"{source}: env: {name!r} is no name of a variable", 'write env = { HF_HOME = "/srv/hf" }'
            )


def with_flags(configured: tuple[ModelConfig, ...], flags: Sequence[str]) -> tuple[ModelConfig, ...]:
    """Return the models of `-m`, or the configured ones without it.

    `ID=REF` keeps the other values of a configured ID; a bare ID names that model. Raises UsageError.
    """
    if not flags:
        return configured
    by_id = {model.id: model for model in configured}
    models = []
    for text in flags:
        head, separator, tail = text.partition("=")
        named = bool(separator) and _ID.fullmatch(head) is not None and not head.startswith(("http", "hf:", "pypi:"))
        if named and not tail:
            raise UsageError(f"-m {text}: the reference after = is missing", "write -m chat=NAME:Q5_K_M")
        if not named and text in by_id:
            models.append(by_id[text])
        else:
            model_id, ref = (head, tail) if named else (id_of(text), text)
            known = by_id.get(model_id, ModelConfig(model_id, ref))
            models.append(replace(known, ref=ref, command=(), origin="flag"))
    return tuple(models)


def check_names(models: tuple[ModelConfig, ...]) -> None:
    """Raise ConfigError for an id or alias that is malformed or used twice."""
    seen: dict[str, str] = {}
    for model in models:
        for name in (model.id, *model.aliases):
            if name == model.id and not _ID.fullmatch(name):
                hint = "letters, digits and . _ : + - are fine; an alias may hold slashes"
                raise ConfigError(f"{model.origin}: {name!r} is no model id", hint)
            if not _ALIAS.fullmatch(name):
                hint = "letters, digits and . _ : + - are fine, and slashes between them"
                raise ConfigError(f"{model.origin}: {name!r} is no alias", hint)
            if name in seen:
                raise ConfigError(
                    f"two models have the id {name!r} ({seen[name]} and {model.id})", "give one another id"
                )
            seen[name] = model.id
    ids = {model.id for model in models}
    for model in models:
        if model.return_to and model.return_to not in ids - {model.id}:
            raise ConfigError(f"{model.origin}: return_to names no other model: {model.return_to!r}", "write its id")
    _check_returns({model.id: model for model in models})


def _check_returns(models: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError for models that would start each other without a request, each time one of them sleeps."""
    for model in models.values():
        ring = [model]
        while ring[-1].ttl_s and (after := ring[-1].return_to) and len(ring) <= len(models):
            ring.append(models[after])
            if after == model.id:
                names = " -> ".join(each.id for each in ring)
                hint = "leave out `return_to` or `ttl_s` of one of them"
                raise ConfigError(f"{model.origin}: models that sleep would wake each other: {names}", hint)


# Ids are parts of socket names and of URLs, so they are made of few characters; a quantization is no part of one, or
# another file of the same model would have another name for its clients.
def id_of(ref: str) -> str:
    """Return the public id of a reference without one: its name without source, quantization and file ending."""
    text = ref.split("#", 1)[0].split("?", 1)[0]
    if text.startswith(("hf://", "modelscope://")):
        text = text.split("@", 1)[0]
    head, colon, tail = text.rpartition(":")
    if colon and _QUANT.fullmatch(tail):
        text = head
    name = public_name(text.rstrip("/")).removesuffix("-GGUF").removesuffix("-gguf")
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-._+")
    return name or "model"
