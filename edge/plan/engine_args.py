"""Options of an engine as an operator writes them, `args` and `edgellm up -- OPTIONS`: split and checked. Pure.

They are checked against the engine's own --help; options that the plan owns are refused with the key that sets them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from edge.config.fields import did_you_mean
from edge.engine.engine import Engine, Flag
from edge.errors import ConfigError

_GATEWAY = "nothing: the gateway depends on it"
_MODEL = "ref in [[model]], or -m"
# Ends the names of llama.cpp's presets, --gpt-oss-20b-default: each sets a model, its context, its batch and a port at
# once (common/arg.cpp).
_PRESET = "-default"
# Options that the plan or the gateway decides, by any of their names, and what sets them instead.
OWNED = {
    "--model": _MODEL,
    "--fim-qwen-7b-spec": _MODEL,
    "--fim-qwen-14b-spec": _MODEL,
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
    "--slot-save-path": "saved_prompts",
    "--split-mode": "split_mode",
    "--tensor-split": "tensor_split",
    "--device": "gpus",
    "--main-gpu": "gpus",
    "--override-tensor": "offload",
    "--rpc": "[[device]]",
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
    "--spec-default": "speculation",
    "--spec-draft-model": "draft",
    "--spec-draft-hf": "draft",
    "--spec-draft-device": "gpus",
    "--spec-draft-ngl": "gpus",
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
    "--ui": "ui",
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
# Other names of the options above, for engines whose help is not known: embedded, or not built yet (common/arg.cpp of
# llama.cpp 0c1e57098).
_OTHER_NAMES = {
    name: option
    for option, names in {
        "--help": "-h --usage",
        "--cache-list": "-cl",
        "--threads": "-t",
        "--threads-batch": "-tb",
        "--ctx-size": "-c",
        "--batch-size": "-b",
        "--ubatch-size": "-ub",
        "--flash-attn": "-fa",
        "--cache-type-k": "-ctk",
        "--cache-type-v": "-ctv",
        "--load-mode": "-lm",
        "--device": "-dev",
        "--n-gpu-layers": "-ngl --gpu-layers",
        "--split-mode": "-sm",
        "--tensor-split": "-ts",
        "--main-gpu": "-mg",
        "--override-tensor": "-ot",
        "--fit": "-fit",
        "--fit-target": "-fitt",
        "--fit-ctx": "-fitc",
        "--model": "-m",
        "--model-url": "-mu",
        "--docker-repo": "-dr",
        "--hf-repo": "-hf -hfr",
        "--hf-file": "-hff",
        "--hf-token": "-hft",
        "--verbose": "-v --log-verbose",
        "--verbosity": "-lv --log-verbosity",
        "--spec-draft-hf": "-hfd -hfrd --hf-repo-draft",
        "--spec-draft-model": "-md --model-draft",
        "--spec-draft-device": "-devd --device-draft",
        "--spec-draft-ngl": "-ngld --gpu-layers-draft --n-gpu-layers-draft",
        "--ctx-checkpoints": "-ctxcp --swa-checkpoints",
        "--cache-ram": "-cram",
        "--kv-unified": "-kvu -no-kvu",
        "--parallel": "-np",
        "--mmproj": "-mm",
        "--mmproj-url": "-mmu",
        "--alias": "-a",
        "--ui-mcp-proxy": "--webui-mcp-proxy",
        "--agent": "-ag -no-ag",
        "--ui": "--webui",
        "--embedding": "--embeddings",
        "--rerank": "--reranking",
        "--reasoning": "-rea",
    }.items()
    for name in names.split()
}
# Options that llama-server takes and ignores (common/arg.cpp).
_IGNORED = {"--defrag-thold": "llama.cpp defragments no KV cache any more"}
# Options that move work between GPUs and host, by their longest names: a build for the CPU has nothing to move.
_GPU_ONLY = frozenset({"--cpu-moe", "--n-cpu-moe", "--n-cpu-ffn", "--kv-offload", "--op-offload"})
_REASONING_FORMATS = ("none", "deepseek", "deepseek-legacy", "auto")  # common_reasoning_format_from_name


def _seed(text: str) -> int:
    return int(text) % (1 << 32)  # a uint32_t, where -1 stands for a random one


def _reasoning_format(text: str) -> str:
    if text not in _REASONING_FORMATS:
        raise ValueError(text)
    return text


# `args` that the embedded engine has as fields of CommonParams: how the value is read, or what a switch sets. Without
# --escape, which only changes texts while llama.cpp reads its arguments.
EMBEDDED: dict[str, tuple[str, Callable[[str], Any] | bool]] = {
    "--predict": ("n_predict", int),
    "--keep": ("n_keep", int),
    "--swa-full": ("swa_full", True),
    "--rope-freq-base": ("rope_freq_base", float),
    "--rope-freq-scale": ("rope_freq_scale", float),
    "--yarn-orig-ctx": ("yarn_orig_ctx", int),
    "--yarn-ext-factor": ("yarn_ext_factor", float),
    "--yarn-attn-factor": ("yarn_attn_factor", float),
    "--yarn-beta-slow": ("yarn_beta_slow", float),
    "--yarn-beta-fast": ("yarn_beta_fast", float),
    "--check-tensors": ("check_tensors", True),
    "--cache-reuse": ("n_cache_reuse", int),
    "--slot-prompt-similarity": ("slot_prompt_similarity", float),
    "--embd-normalize": ("embd_normalize", int),
    "--image-min-tokens": ("image_min_tokens", int),
    "--image-max-tokens": ("image_max_tokens", int),
    "--special": ("special", True),
    "--threads-http": ("n_threads_http", int),
    "--cont-batching": ("cont_batching", True),
    "--no-cont-batching": ("cont_batching", False),
    "--cache-prompt": ("cache_prompt", True),
    "--no-cache-prompt": ("cache_prompt", False),
    "--cache-idle-slots": ("cache_idle_slots", True),
    "--no-cache-idle-slots": ("cache_idle_slots", False),
    "--checkpoint-min-step": ("checkpoint_min_step", int),
    "--repack": ("no_extra_bufts", False),
    "--no-repack": ("no_extra_bufts", True),
    "--no-host": ("no_host", True),
    "--prefill-assistant": ("prefill_assistant", True),
    "--no-prefill-assistant": ("prefill_assistant", False),
    "--reasoning-format": ("reasoning_format", _reasoning_format),
    "--mtmd-batch-max-tokens": ("mtmd_batch_max_tokens", int),
    "--sse-ping-interval": ("sse_ping_interval", int),
    "--seed": ("sampling.seed", _seed),
    "--repeat-last-n": ("sampling.penalty_last_n", int),
    "--typical": ("sampling.typ_p", float),
    "--xtc-probability": ("sampling.xtc_probability", float),
    "--xtc-threshold": ("sampling.xtc_threshold", float),
    "--dry-multiplier": ("sampling.dry_multiplier", float),
    "--dry-base": ("sampling.dry_base", float),
    "--dry-allowed-length": ("sampling.dry_allowed_length", int),
    "--dynatemp-range": ("sampling.dynatemp_range", float),
    "--mirostat": ("sampling.mirostat", int),
    "--ignore-eos": ("sampling.ignore_eos", True),
    "--dry-penalty-last-n": ("sampling.dry_penalty_last_n", int),
    "--dynatemp-exp": ("sampling.dynatemp_exponent", float),
    "--mirostat-lr": ("sampling.mirostat_eta", float),
    "--mirostat-ent": ("sampling.mirostat_tau", float),
    "--adaptive-target": ("sampling.adaptive_target", float),
    "--adaptive-decay": ("sampling.adaptive_decay", float),
    "--samplers": ("sampling.samplers", str),
    "--spec-draft-n-max": ("speculative.draft.n_max", int),
    "--spec-draft-n-min": ("speculative.draft.n_min", int),
    "--spec-draft-p-min": ("speculative.draft.p_min", float),
    "--spec-draft-p-split": ("speculative.draft.p_split", float),
    "--spec-ngram-mod-n-min": ("speculative.ngram_mod.n_min", int),
    "--spec-ngram-mod-n-max": ("speculative.ngram_mod.n_max", int),
    "--spec-ngram-mod-n-match": ("speculative.ngram_mod.n_match", int),
    **{
        f"--spec-ngram-{kind}-{part}": (f"speculative.ngram_{kind}.{part}".replace("-", "_"), int)
        for kind in ("simple", "map-k", "map-k4v")
        for part in ("size-n", "size-m", "min-hits")
    },
}
# Their other names (common/arg.cpp).
_EMBEDDED_NAMES = {
    "-n": "--predict",
    "--n-predict": "--predict",
    "-sps": "--slot-prompt-similarity",
    "-sp": "--special",
    "-s": "--seed",
    "--typical-p": "--typical",
    "-cb": "--cont-batching",
    "-nocb": "--no-cont-batching",
    "-cms": "--checkpoint-min-step",
    "-nr": "--no-repack",
    "--draft-p-min": "--spec-draft-p-min",
    "--draft-p-split": "--spec-draft-p-split",
}
# Options that llama-server takes as `args`, and the embedded engine as keys.
_SAMPLING_KEYS = {
    "--temp": "temperature",
    "--temperature": "temperature",
    "--top-p": "top_p",
    "--top-k": "top_k",
    "--min-p": "min_p",
    "--repeat-penalty": "repeat_penalty",
    "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
}

_HINT = "the options are those of `llama-server --help`"
_NUMBER = re.compile(r"-[0-9.]+")


def check_args(words: Sequence[str], engine: Engine) -> list[tuple[str, tuple[str, ...]]]:
    """Split `args` into options with their values. Raises ConfigError: unknown, owned, ignored, or too few values."""
    found: list[tuple[str, tuple[str, ...]]] = []
    # By the longest name, so that -c, --ctx-size and a later alias are one option.
    owned = {_positive(_spelling(name, engine)): key for name, key in OWNED.items()}
    refused = {_positive(_spelling(name, engine)): why for name, why in _REFUSED.items()}
    ignored = {_positive(_spelling(name, engine)): why for name, why in _without_effect(engine).items()}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option = _positive(_spelling(_positive(word), engine))
        if option in owned or option.endswith(_PRESET):
            raise ConfigError(f"args: {word} is decided by edgellm", f"instead: {owned.get(option, _MODEL)}")
        if option in refused:
            raise ConfigError(f"args: {word} is refused: {refused[option]}")
        if option in ignored:
            raise ConfigError(f"args: {word} has no effect: {ignored[option]}", "leave it out")
        flag = _assumed(word, rest) if engine.assumed else _known(word, engine)
        if len(rest) < flag.arity:
            raise ConfigError(f"args: {word} wants {flag.arity} value{'s' if flag.arity > 1 else ''}", _HINT)
        for value in rest[: flag.arity]:
            if value in engine.flags:
                raise ConfigError(f"args: {word} wants a value, and {value} is an option", _HINT)
        found.append((word, tuple(rest[: flag.arity])))
        del rest[: flag.arity]
    return found


def _without_effect(engine: Engine) -> dict[str, str]:
    """Return the options that this build takes and ignores, with the reason."""
    if engine.kind == "embedded" or engine.cuda or engine.devices or engine.assumed:
        return _IGNORED
    return {**_IGNORED, **dict.fromkeys(_GPU_ONLY, "this engine computes on the CPU alone")}


def _known(word: str, engine: Engine) -> Flag:
    if engine.kind == "embedded":
        if (option := embedded_name(word)) in EMBEDDED:
            return Flag(word, 0 if isinstance(EMBEDDED[option][1], bool) else 1)
        if word in _SAMPLING_KEYS:
            raise ConfigError(f"args: the embedded engine has no {word}", f"instead: {_SAMPLING_KEYS[word]}")
        near = did_you_mean(word, EMBEDDED)
        raise ConfigError(
            f"args: the embedded engine has no {word}{near}",
            "`edgellm build` makes a llama-server, which has all options",
        )
    if word not in engine.flags:
        if not word.startswith("-"):
            raise ConfigError(f"args: {word!r} is no option, and the one before it takes no further value", _HINT)
        raise ConfigError(f"args: this engine has no option {word}{did_you_mean(word, engine.flags)}", _HINT)
    return engine.flags[word]


def _assumed(word: str, rest: Sequence[str]) -> Flag:
    """Return the flag that a word looks like: the help of an engine that is not built yet is not known."""
    values = next((n for n, each in enumerate(rest) if each.startswith("-") and not _NUMBER.fullmatch(each)), len(rest))
    if not word.startswith("-"):
        raise ConfigError(f"args: {word!r} is no option", _HINT)
    return Flag(word, values)


def _spelling(name: str, engine: Engine) -> str:
    """Return the longest name of an option, which all its names share."""
    flag = engine.flags.get(name)
    longest = flag.spelling if flag else name
    return _OTHER_NAMES.get(longest, longest)


def _positive(word: str) -> str:
    """Return --ui for --no-ui: a switch is owned in both directions. --no-host is about buffers, not about --host."""
    if word == "--no-host":
        return word
    return f"--{word.removeprefix('--no-')}" if word.startswith("--no-") else word


def embedded_name(word: str) -> str:
    """Return the name under which EMBEDDED has an option."""
    return _EMBEDDED_NAMES.get(word, word)


def embedded_fields(words: Sequence[str], engine: Engine) -> dict[str, Any]:
    """Return `args` as fields of CommonParams. Raises ConfigError, for a value that it would not take too."""
    fields: dict[str, Any] = {}
    for option, values in check_args(words, engine):
        field, read = EMBEDDED[embedded_name(option)]
        if isinstance(read, bool):
            fields[field] = read
            continue
        try:
            fields[field] = read(values[0])
        except ValueError:
            kind = " or ".join(_REASONING_FORMATS) if read is _reasoning_format else "a number"
            raise ConfigError(f"args: {option} wants {kind}, got {values[0]!r}", _HINT) from None
    return fields
