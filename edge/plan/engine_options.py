"""Options of an engine that the plan does not compute: keys of a preset, and `args` as written. Pure.

Each key is rendered for llama-server in the spelling of its --help, and as fields of CommonParams for the embedded
engine. `args` are checked against the same --help; options that the plan owns are refused with the key that sets them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from edge.config.values import Preset
from edge.engine.engine import Engine
from edge.errors import ConfigError
from edge.plan.engine_args import SAMPLING, check_args, embedded_fields
from edge.plan.plan import EngineOptions, Reason

# By field, its bit of user_sampling_config; llama-server sets those of `args` itself.
_BITS = {f"sampling.{field}": bit for _, field, bit in SAMPLING.values() if bit} | {
    "sampling.samplers": "SAMPLERS",
    "sampling.penalty_last_n": "PENALTY_LAST_N",
    "sampling.xtc_probability": "XTC_PROBABILITY",
    "sampling.xtc_threshold": "XTC_THRESHOLD",
    "sampling.mirostat": "MIROSTAT",
    "sampling.mirostat_tau": "MIROSTAT_TAU",
    "sampling.mirostat_eta": "MIROSTAT_ETA",
}
_REASONING = {"off": 0, "on": 1}  # common_params::enable_reasoning
# With a budget of 0 llama.cpp takes the newline that a template writes behind its start tag for the forced end, and the
# model thinks without a limit (ggml-org/llama.cpp pull request 28356). With 1 that newline is all of the thinking.
_LEAST_BUDGET = 1
SIMPLE_DRAFT = "draft-simple"  # with any model of the same vocabulary
_SPECULATION = {"ngram": "ngram-mod", "mtp": "draft-mtp"}


def engine_options(
    preset: Preset, engine: Engine, origins: Mapping[str, str], draft_type: str = SIMPLE_DRAFT
) -> EngineOptions:
    """Render the keys that differ from their default, and check `args`. Raises ConfigError.

    `origins`: by key, the layer that set it. `draft_type`: the value of --spec-type for the drafter.
    """
    if preset.draft and draft_type != SIMPLE_DRAFT and (lacking := _lacking(draft_type, engine)):
        raise ConfigError(f"draft: {preset.draft} needs {lacking}, which this engine lacks", "edgellm build")
    default = Preset()
    values = {name: getattr(preset, name) for name in _KEYS if getattr(preset, name) != getattr(default, name)}
    reasons = [
        Reason(name, _shown(value), _BECAUSE.get(name, "as requested"), origins.get(name, "default"))
        for name, value in values.items()
    ]
    if engine.kind == "embedded":
        params: dict[str, Any] = {}
        for name, value in values.items():
            params |= _embedded(name, value, preset, draft_type)
        bits = [_BITS[field] for field in params if field in _BITS]
        params |= {"sampling.user_sampling_config": bits} if bits else {}
        return EngineOptions(params=params, reasons=tuple(reasons))
    # Behind the plan's options: of two values llama.cpp takes the later one.
    args: list[str] = []
    absent: dict[str, str] = {}  # by key: what this engine lacks
    for name, value in values.items():
        for names, words in _options(name, value, preset, engine, draft_type):
            found = next((each for each in names if engine.has(each) or engine.assumed), None)
            if found is None:
                absent[name] = names[0]
            else:
                args += [found, *words]
    wanted = _SPECULATION.get(preset.speculation)
    if wanted and (lacking := _lacking(wanted, engine)):
        absent["speculation"] = lacking
    unknown = tuple(f"{name} has no effect: this engine has no {option}" for name, option in absent.items())
    because = {name: f"no effect: this engine has no {option}" for name, option in absent.items()}
    reasons = [replace(each, because=because.get(each.subject, each.because)) for each in reasons]
    return EngineOptions(tuple(args), unknown=unknown, reasons=tuple(reasons))


def _lacking(kind: str, engine: Engine) -> str | None:
    """Return the option that this engine lacks for a kind of drafts; None where it has it, or its help is unknown."""
    if engine.kind == "embedded":
        return None
    flag = engine.flags.get("--spec-type")
    if flag is None:
        return None if engine.assumed else "--spec-type"
    return f"--spec-type {kind}" if flag.values and kind not in flag.values else None


_KEYS = (
    "chat_template_file",
    "chat_template_kwargs",
    "reasoning",
    "reasoning_budget",
    *SAMPLING,
    "pooling",
    "lora",
    "rope_scaling",
    "rope_scale",
    "draft",
    "speculation",
    "args",
)
# Without effect on a model for embeddings or ranking.
CHAT_KEYS = frozenset(_KEYS) - {"pooling", "lora", "rope_scaling", "rope_scale", "args"}
# Options of llama-server that the keys are rendered with, in their newest spelling.
OPTION_NAMES = (
    *(option for option, _, _ in SAMPLING.values()),
    *("--" + key.replace("_", "-") for key in _KEYS if key not in (*SAMPLING, "args", "draft", "speculation")),
    *("--lora-scaled", "--spec-type", "--spec-draft-model", "--spec-draft-device", "--spec-draft-ngl"),
)
_BECAUSE = {
    "args": "as requested; layers kept on the CPU are counted, other memory is known after the first start",
    "draft": "as requested; weights, cache and buffers are counted",
    "lora": "as requested; the files are counted",
}


def _options(
    name: str, value: Any, preset: Preset, engine: Engine, draft_type: str
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the options of one key for llama-server: possible names, and the words behind."""
    if name == "args":
        return [((option,), words) for option, words in check_args(value, engine)]
    if name == "lora":
        return [_adapter(entry, engine) for entry in value]
    if name in SAMPLING:
        return [((SAMPLING[name][0],), (f"{value:g}",))]
    if name in ("draft", "speculation"):
        if name == "speculation" and preset.draft:
            return []  # rendered with the drafter
        # Before it had names for drafters, an engine drafted with any that it was given.
        kinds = [kind for kind in _types(preset, draft_type) if not _lacking(kind, engine)]
        types = [(("--spec-type",), (",".join(kinds),))] if kinds else []
        path = [(("--spec-draft-model", "--model-draft", "-md"), (value,))] if name == "draft" else []
        return [*path, *types]
    if name == "reasoning" and not engine.has("--reasoning") and value == "off":
        return [(("--reasoning-budget",), ("0",))]  # before 2026 the only switch
    if name == "reasoning_budget" and (engine.has("--reasoning") or engine.assumed):
        value = value or _LEAST_BUDGET
    elif name == "reasoning_budget" and value > 0:
        return [(("--reasoning-budget N",), ())]  # before --reasoning it took -1 and 0, and refused to start with more
    words = {
        "chat_template_kwargs": lambda: json.dumps(value, separators=(",", ":"), sort_keys=True),
        "rope_scale": lambda: f"{value:g}",
    }.get(name, lambda: str(value))()
    return [(("--" + name.replace("_", "-"),), (words,))]


def _adapter(entry: str, engine: Engine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    path, scale = adapter(entry)
    scaled = engine.flags.get("--lora-scaled")
    if scaled is not None and scaled.arity == 2:  # of older builds: FNAME SCALE, and no list
        return (("--lora",), (path,)) if scale == 1 else (("--lora-scaled",), (path, f"{scale:g}"))
    if scale != 1 and ":" in path:
        raise ConfigError(f"lora: llama-server takes no scale for a path with a colon: {path}", "rename the file")
    # Both take lists (parse_csv_row in common/arg.cpp).
    listed = '"' + path.replace('"', '""') + '"' if set(path) & {",", '"'} else path
    if scale == 1:
        return ("--lora",), (listed,)
    name = f"{path}:{scale:g}"
    return ("--lora-scaled",), ('"' + name.replace('"', '""') + '"' if listed != path else name,)


def adapter(entry: str) -> tuple[str, float]:
    """Split `PATH` or `PATH:SCALE` of the key lora."""
    path, colon, tail = entry.rpartition(":")
    try:
        scale = float(tail) if colon else math.nan
    except ValueError:
        scale = math.nan
    return (path, scale) if math.isfinite(scale) else (entry, 1.0)


def _embedded(name: str, value: Any, preset: Preset, draft_type: str) -> dict[str, Any]:
    """Return the fields of CommonParams for one key."""
    if name in SAMPLING:
        return {f"sampling.{SAMPLING[name][1]}": value}
    if name == "args":
        return embedded_fields(value, Engine("embedded", "embedded", ""))
    fields: dict[str, Any] = {
        "chat_template_file": ("chat_template_file", value),  # the engine's process reads it
        "chat_template_kwargs": ("default_template_kwargs", _template_kwargs(preset)),
        "reasoning": ("enable_reasoning", _REASONING.get(str(value), -1)),
        "reasoning_budget": ("sampling.reasoning_budget_tokens", value or _LEAST_BUDGET),
        "pooling": ("pooling_type", value),
        "lora": ("lora_adapters", [list(adapter(entry)) for entry in preset.lora]),
        "rope_scaling": ("rope_scaling_type", value),
        "rope_scale": ("rope_freq_scale", 1 / preset.rope_scale if preset.rope_scale else 0.0),
        "draft": ("speculative.draft.mparams.path", value),
        "speculation": ("speculative.types", _types(preset, draft_type)),
    }
    field, rendered = fields[name]
    beside: dict[str, dict[str, Any]] = {
        "draft": {"speculative.types": _types(preset, draft_type)},
        "reasoning": {"default_template_kwargs": _template_kwargs(preset)},
    }
    return {field: rendered, **beside.get(name, {})}


def _template_kwargs(preset: Preset) -> dict[str, str]:
    """Return JSON values for the template. As --reasoning does (common/arg.cpp), a decision on thinking is one of them:
    without it the engine follows `enable_reasoning` only where it recognizes the template's way of thinking."""
    kwargs = {key: json.dumps(one) for key, one in preset.chat_template_kwargs.items()}
    if preset.reasoning in _REASONING:
        kwargs["enable_thinking"] = json.dumps(preset.reasoning == "on")
    return kwargs


def _types(preset: Preset, draft_type: str) -> list[str]:
    """Return the names of --spec-type for a drafter and for drafts without one."""
    plain = [_SPECULATION[preset.speculation]] if preset.speculation != "off" else []
    return list(dict.fromkeys([draft_type, *plain] if preset.draft else plain))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
