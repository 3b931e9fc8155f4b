"""Options of an engine that the plan does not compute: keys of a preset, and `args` as written. Pure.

Each key is rendered for llama-server in the spelling of its --help, and as fields of CommonParams for the embedded
engine. `args` are checked against the same --help; options that the plan owns are refused with the key that sets them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from edge.config.fields import did_you_mean
from edge.config.values import Preset
from edge.engine.engine import Engine, Flag
from edge.errors import ConfigError
from edge.plan.plan import Reason

# Sampling keys: option of llama-server, field of CommonParamsSampling, bit of its user_sampling_config (which keeps the
# value over the one in the file's metadata; common/common.h).
_SAMPLING = {
    "temperature": ("--temp", "temp", "TEMP"),
    "top_p": ("--top-p", "top_p", "TOP_P"),
    "top_k": ("--top-k", "top_k", "TOP_K"),
    "min_p": ("--min-p", "min_p", "MIN_P"),
    "repeat_penalty": ("--repeat-penalty", "penalty_repeat", "PENALTY_REPEAT"),
    "presence_penalty": ("--presence-penalty", "penalty_present", ""),
    "frequency_penalty": ("--frequency-penalty", "penalty_freq", ""),
}
_REASONING = {"off": 0, "on": 1}  # common_params::enable_reasoning
_SPECULATION = {"ngram": "ngram-mod", "mtp": "draft-mtp"}
_GATEWAY = "nothing: the gateway depends on it"
# Options that the plan or the gateway decides, by any of their names, and what sets them instead.
OWNED = {
    "--model": "ref in [[model]], or -m",
    "--alias": "id and aliases in [[model]]",
    "--host": "listen",
    "--port": "listen",
    "--path": _GATEWAY,
    "--api-prefix": _GATEWAY,
    "--reuse-port": "listen",
    "--ctx-size": "n_ctx",
    "--parallel": "n_parallel",
    "--batch-size": "n_batch",
    "--ubatch-size": "n_ubatch",
    "--n-gpu-layers": "offload",
    "--cache-type-k": "kv_type_k",
    "--cache-type-v": "kv_type_v",
    "--flash-attn": "flash_attention",
    "--load-mode": "load_mode",
    "--mmap": "load_mode",
    "--no-mmap": "load_mode",
    "--mlock": "load_mode",
    "--direct-io": "load_mode",
    "--threads": "n_threads",
    "--threads-batch": "n_threads",
    "--cache-ram": "cache_ram",
    "--ctx-checkpoints": "cache_ram",
    "--split-mode": "split_mode",
    "--tensor-split": "tensor_split",
    "--device": "gpus",
    "--main-gpu": "gpus",
    "--fit": "n_ctx_min",
    "--fit-target": "reserve",
    "--fit-ctx": "n_ctx_min",
    "--kv-unified": "n_parallel",
    "--kv-unified-per-slot": "n_ctx",
    "--context-shift": "n_ctx",
    "--mmproj": "mmproj",
    "--mmproj-auto": "mmproj",
    "--mmproj-url": "edgellm model pull --projector",
    "--lora": "lora",
    "--lora-scaled": "lora",
    "--chat-template": "chat_template_file",
    "--chat-template-file": "chat_template_file",
    "--chat-template-kwargs": "chat_template_kwargs",
    "--jinja": "chat_template_file",
    "--reasoning": "reasoning",
    "--reasoning-budget": "reasoning_budget",
    "--pooling": "pooling",
    "--embedding": "role in [[model]]",
    "--rerank": "role in [[model]]",
    "--rope-scaling": "rope_scaling",
    "--rope-scale": "rope_scale",
    "--spec-type": "speculation",
    "--spec-draft-model": "draft",
    "--spec-draft-hf": "draft",
    "--sleep-idle-seconds": "ttl_s in [[model]]",
    "--models-dir": "[[model]]",
    "--models-preset": "[[model]]",
    "--models-max": "[[model]]",
    "--models-autoload": "preload in [[model]]",
    "--hf-repo": "edgellm model pull",
    "--hf-file": "edgellm model pull",
    "--hf-token": "edgellm model pull",
    "--model-url": "edgellm model pull",
    "--docker-repo": "edgellm model pull",
    "--offline": "edgellm model pull",
    "--api-key": "edgellm key add",
    "--api-key-file": "gateway.keys_file",
    "--ssl-key-file": "gateway.tls_key",
    "--ssl-cert-file": "gateway.tls_cert",
    "--cors-origins": "gateway.cors_origins",
    "--ui": _GATEWAY,
    "--metrics": _GATEWAY,
    "--slots": _GATEWAY,
    "--props": _GATEWAY,
    "--warmup": "warmup_tokens",
    "--verbosity": "edgellm logs --engine",
    "--verbose": "edgellm logs --engine",
    "--log-disable": "edgellm logs --engine",
    "--log-file": "edgellm logs --engine",
    "--log-jsonl": "edgellm logs --engine",
    "--log-colors": "edgellm logs --engine",
    "--log-prefix": "edgellm logs --engine",
    "--log-timestamps": "edgellm logs --engine",
}
# Options that end the engine at once, or let a client run programs.
_REFUSED = {
    "--help": "it prints and exits",
    "--version": "it prints and exits",
    "--cache-list": "it prints and exits",
    "--list-devices": "it prints and exits",
    "--completion-bash": "it prints and exits",
    "--tools": "it lets clients run programs",
    "--agent": "it lets clients run programs",
    "--mcp-servers-config": "it lets clients run programs",
    "--mcp-servers-json": "it lets clients run programs",
    "--ui-mcp-proxy": "it lets clients reach other machines",
}
# `args` that the embedded engine has as fields of CommonParams; a bare option sets a boolean.
_EMBEDDED: dict[str, tuple[str, type]] = {
    "--predict": ("n_predict", int),
    "--keep": ("n_keep", int),
    "--swa-full": ("swa_full", bool),
    "--rope-freq-base": ("rope_freq_base", float),
    "--rope-freq-scale": ("rope_freq_scale", float),
    "--yarn-orig-ctx": ("yarn_orig_ctx", int),
    "--yarn-ext-factor": ("yarn_ext_factor", float),
    "--yarn-attn-factor": ("yarn_attn_factor", float),
    "--yarn-beta-slow": ("yarn_beta_slow", float),
    "--yarn-beta-fast": ("yarn_beta_fast", float),
    "--check-tensors": ("check_tensors", bool),
    "--cache-reuse": ("n_cache_reuse", int),
    "--slot-prompt-similarity": ("slot_prompt_similarity", float),
    "--embd-normalize": ("embd_normalize", int),
    "--image-min-tokens": ("image_min_tokens", int),
    "--image-max-tokens": ("image_max_tokens", int),
    "--special": ("special", bool),
    "--seed": ("sampling.seed", int),
    "--repeat-last-n": ("sampling.penalty_last_n", int),
    "--typical": ("sampling.typ_p", float),
    "--xtc-probability": ("sampling.xtc_probability", float),
    "--xtc-threshold": ("sampling.xtc_threshold", float),
    "--dry-multiplier": ("sampling.dry_multiplier", float),
    "--dry-base": ("sampling.dry_base", float),
    "--dry-allowed-length": ("sampling.dry_allowed_length", int),
    "--dynatemp-range": ("sampling.dynatemp_range", float),
    "--mirostat": ("sampling.mirostat", int),
    "--ignore-eos": ("sampling.ignore_eos", bool),
    "--threads-http": ("n_threads_http", int),
}


class EngineOptions(Struct, frozen=True):
    """Options behind those of the plan. `params` are fields of CommonParams; `unknown` are keys this engine lacks."""

    args: tuple[str, ...] = ()
    params: Mapping[str, Any] = {}
    unknown: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()


def engine_options(preset: Preset, engine: Engine, origins: Mapping[str, str]) -> EngineOptions:
    """Render the keys that differ from their default, and check `args`. Raises ConfigError.

    `origins`: by key, the layer that set it.
    """
    default = Preset()
    values = {name: getattr(preset, name) for name in _KEYS if getattr(preset, name) != getattr(default, name)}
    reasons = [
        Reason(name, _shown(value), "as requested", origins.get(name, "default")) for name, value in values.items()
    ]
    if engine.kind == "embedded":
        params: dict[str, Any] = {}
        for name, value in values.items():
            params |= _embedded(name, value, preset)
        bits = [_SAMPLING[name][2] for name in values if name in _SAMPLING and _SAMPLING[name][2]]
        params |= {"sampling.user_sampling_config": bits} if bits else {}
        return EngineOptions(params=params, reasons=tuple(reasons))
    args: list[str] = []
    unknown: list[str] = []
    for name, value in values.items():
        for names, words in _options(name, value, preset, engine):
            found = next((each for each in names if engine.has(each)), None)
            if found is None:
                unknown.append(f"{name} has no effect: this engine has no {names[0]}")
            else:
                args += [found, *words]
    return EngineOptions(tuple(args), unknown=tuple(unknown), reasons=tuple(reasons))


def check_args(words: Sequence[str], engine: Engine) -> list[tuple[str, tuple[str, ...]]]:
    """Split `args` into options with their values. Raises ConfigError: unknown, owned, or too few values."""
    found: list[tuple[str, tuple[str, ...]]] = []
    owned = {_spelling(name, engine): key for name, key in OWNED.items()}
    refused = {_spelling(name, engine): why for name, why in _REFUSED.items()}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option = _spelling(_positive(word), engine)
        if option in owned:
            raise ConfigError(f"args: {word} is decided by edgellm", f"instead: {owned[option]}")
        if option in refused:
            raise ConfigError(f"args: {word} is refused: {refused[option]}")
        flag = _known(word, engine)
        if len(rest) < flag.arity:
            raise ConfigError(f"args: {word} wants {flag.arity} value{'s' if flag.arity > 1 else ''}", _HINT)
        found.append((word, tuple(rest[: flag.arity])))
        del rest[: flag.arity]
    return found


_KEYS = (
    "chat_template_file",
    "chat_template_kwargs",
    "reasoning",
    "reasoning_budget",
    *_SAMPLING,
    "pooling",
    "lora",
    "rope_scaling",
    "rope_scale",
    "draft",
    "speculation",
    "args",
)
_HINT = "the options are those of `llama-server --help`"


def _known(word: str, engine: Engine) -> Flag:
    if engine.kind == "embedded":
        if word in _EMBEDDED:
            return Flag(word, 0 if _EMBEDDED[word][1] is bool else 1)
        near = did_you_mean(word, _EMBEDDED)
        raise ConfigError(
            f"args: the embedded engine has no {word}{near}",
            "`edgellm build` makes a llama-server, which has all options",
        )
    if word not in engine.flags:
        if not word.startswith("-"):
            raise ConfigError(f"args: {word!r} is no option, and the one before it takes no further value", _HINT)
        raise ConfigError(f"args: this engine has no option {word}{did_you_mean(word, engine.flags)}", _HINT)
    return engine.flags[word]


def _spelling(name: str, engine: Engine) -> str:
    """Return the longest name of an option, which all its names share."""
    flag = engine.flags.get(name)
    return flag.spelling if flag else name


def _positive(word: str) -> str:
    """Return --ui for --no-ui: a switch is owned in both directions."""
    return f"--{word.removeprefix('--no-')}" if word.startswith("--no-") else word


def _options(name: str, value: Any, preset: Preset, engine: Engine) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the options of one key for llama-server: possible names, and the words behind."""
    if name == "args":
        return [((option,), words) for option, words in check_args(value, engine)]
    if name == "lora":
        return [_adapter(entry) for entry in value]
    if name in _SAMPLING:
        return [((_SAMPLING[name][0],), (f"{value:g}",))]
    if name in ("draft", "speculation"):
        if name == "speculation" and preset.draft:
            return []  # told with the drafter
        types = [(("--spec-type",), (",".join(_types(preset)),))] if engine.has("--spec-type") else []
        path = [(("--spec-draft-model", "--model-draft", "-md"), (value,))] if name == "draft" else []
        return [*path, *types]
    if name == "reasoning" and not engine.has("--reasoning") and value == "off":
        return [(("--reasoning-budget",), ("0",))]  # before 2026 the only switch
    words = {
        "chat_template_kwargs": lambda: json.dumps(value, separators=(",", ":"), sort_keys=True),
        "rope_scale": lambda: f"{value:g}",
    }.get(name, lambda: str(value))()
    return [(("--" + name.replace("_", "-"),), (words,))]


def _adapter(entry: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    path, scale = adapter(entry)
    return (("--lora",), (path,)) if scale == 1 else (("--lora-scaled",), (f"{path}:{scale:g}",))


def adapter(entry: str) -> tuple[str, float]:
    """Split `PATH` or `PATH:SCALE` of the key lora."""
    path, colon, tail = entry.rpartition(":")
    try:
        return (path, float(tail)) if colon else (entry, 1.0)
    except ValueError:
        return entry, 1.0


def _embedded(name: str, value: Any, preset: Preset) -> dict[str, Any]:
    """Return the fields of CommonParams for one key."""
    if name in _SAMPLING:
        return {f"sampling.{_SAMPLING[name][1]}": value}
    if name == "args":
        engine = Engine("embedded", "embedded", "")
        return {
            _EMBEDDED[option][0]: _EMBEDDED[option][1](words[0]) if words else True
            for option, words in _numbers(check_args(value, engine))
        }
    fields: dict[str, Any] = {
        "chat_template_file": ("chat_template_file", value),  # the engine's process reads it
        "chat_template_kwargs": (
            "default_template_kwargs",
            {key: json.dumps(one) for key, one in preset.chat_template_kwargs.items()},
        ),
        "reasoning": ("enable_reasoning", _REASONING.get(str(value), -1)),
        "reasoning_budget": ("sampling.reasoning_budget_tokens", value),
        "pooling": ("pooling_type", value),
        "lora": ("lora_adapters", [list(adapter(entry)) for entry in preset.lora]),
        "rope_scaling": ("rope_scaling_type", value),
        "rope_scale": ("rope_freq_scale", 1 / preset.rope_scale if preset.rope_scale else 0.0),
        "draft": ("speculative.draft.mparams.path", value),
        "speculation": ("speculative.types", _types(preset)),
    }
    field, rendered = fields[name]
    return {field: rendered} | ({"speculative.types": _types(preset)} if name == "draft" else {})


def _types(preset: Preset) -> list[str]:
    """Return the names of --spec-type for a drafter and for drafts without one."""
    plain = [_SPECULATION[preset.speculation]] if preset.speculation != "off" else []
    return (["draft-simple"] if preset.draft else []) + plain


def _numbers(options: list[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Raise ConfigError for a value that CommonParams would not take."""
    for option, words in options:
        for word in words:
            try:
                _EMBEDDED[option][1](word)
            except ValueError:
                raise ConfigError(f"args: {option} wants a number, got {word!r}", _HINT) from None
    return options


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
