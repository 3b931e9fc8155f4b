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
from edge.units import counted


def _by_word(groups: dict[str, str]) -> dict[str, str]:
    """Return the key of each word in the texts of `groups`."""
    return {word: key for key, words in groups.items() for word in words.split()}


_GATEWAY = "nothing: the gateway depends on it"
_MODEL = "ref in [[model]], or -m"
# The end of the names of llama.cpp's presets, as in --gpt-oss-20b-default: each sets a model, its context, its batch
# and a port at once (common/arg.cpp).
_PRESET = "-default"
# Options that the plan or the gateway decides, by any of their names: what sets them instead.
OWNED = _by_word(
    {
        _MODEL: "--model --fim-qwen-7b-spec --fim-qwen-14b-spec",
        "id and aliases in [[model]]": "--alias",
        "listen": "--host --port --reuse-port",
        _GATEWAY: "--path --api-prefix --metrics --slots --props",
        "n_ctx": "--ctx-size --kv-unified-per-slot --context-shift",
        "n_parallel": "--parallel --kv-unified",
        "n_batch": "--batch-size",
        "n_ubatch": "--ubatch-size",
        "offload": "--n-gpu-layers --override-tensor",
        "kv_type_k": "--cache-type-k",
        "kv_type_v": "--cache-type-v",
        "flash_attention": "--flash-attn",
        "load_mode": "--load-mode --mmap --no-mmap --mlock --direct-io",
        "n_threads": "--threads --threads-batch",
        "cache_ram": "--cache-ram --ctx-checkpoints",
        "saved_prompts": "--slot-save-path",
        "split_mode": "--split-mode",
        "tensor_split": "--tensor-split",
        "gpus": "--device --main-gpu --spec-draft-device --spec-draft-ngl",
        "[[device]]": "--rpc",
        "n_ctx_min": "--fit --fit-ctx",
        "reserve": "--fit-target",
        "mmproj": "--mmproj --mmproj-auto",
        "edgellm model pull --projector": "--mmproj-url",
        "lora": "--lora --lora-scaled",
        "chat_template_file": "--chat-template --chat-template-file --jinja",
        "chat_template_kwargs": "--chat-template-kwargs",
        "reasoning": "--reasoning",
        "reasoning_budget": "--reasoning-budget",
        "pooling": "--pooling",
        "role in [[model]]": "--embedding --rerank",
        "rope_scaling": "--rope-scaling",
        "rope_scale": "--rope-scale",
        "speculation": "--spec-type --spec-default",
        "draft": "--spec-draft-model --spec-draft-hf",
        "ttl_s in [[model]]": "--sleep-idle-seconds",
        "[[model]]": "--models-dir --models-preset --models-max",
        "preload in [[model]]": "--models-autoload",
        "edgellm model pull": "--hf-repo --hf-file --hf-token --model-url --docker-repo --offline",
        "edgellm key add": "--api-key",
        "gateway.keys_file": "--api-key-file",
        "gateway.tls_key": "--ssl-key-file",
        "gateway.tls_cert": "--ssl-cert-file",
        "gateway.cors_origins": "--cors-origins",
        "ui": "--ui",
        "warmup_tokens": "--warmup",
        "edgellm logs --engine": (
            "--verbosity --verbose --log-disable --log-file --log-jsonl --log-colors --log-prefix --log-timestamps"
        ),
    }
)
# Options that end the engine at once, or let a client run programs.
_REFUSED = _by_word(
    {
        "it prints and exits": "--help --version --cache-list --list-devices --completion-bash",
        "it lets clients run programs": "--tools --agent --mcp-servers-config --mcp-servers-json",
        "it lets clients reach other machines": "--ui-mcp-proxy",
    }
)
# Other names of the options above, for engines whose help is not known: embedded, or not built yet (common/arg.cpp of
# llama.cpp 0c1e57098).
_OTHER_NAMES = _by_word(
    {
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
    }
)
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


_Read = Callable[[str], Any] | bool  # of a value, or what a switch sets


def _fields(read: _Read, inside: str, words: str) -> dict[str, tuple[str, _Read]]:
    """Return the options whose field of CommonParams, or of the struct `inside` it, has their name."""
    return {f"--{word}": (inside + word.replace("-", "_"), read) for word in words.split()}


# `args` that the embedded engine has as fields of CommonParams, and how they are read. Without --escape, which only
# changes texts while llama.cpp reads its arguments.
EMBEDDED: dict[str, tuple[str, _Read]] = {
    **_fields(True, "", "swa-full check-tensors special cont-batching cache-prompt cache-idle-slots"),
    **_fields(True, "", "no-host prefill-assistant"),
    **_fields(int, "", "yarn-orig-ctx embd-normalize image-min-tokens image-max-tokens checkpoint-min-step"),
    **_fields(int, "", "mtmd-batch-max-tokens sse-ping-interval"),
    **_fields(float, "", "rope-freq-base rope-freq-scale slot-prompt-similarity"),
    **_fields(float, "", "yarn-ext-factor yarn-attn-factor yarn-beta-slow yarn-beta-fast"),
    **_fields(int, "sampling.", "dry-allowed-length dry-penalty-last-n mirostat"),
    **_fields(float, "sampling.", "xtc-probability xtc-threshold dry-multiplier dry-base dynatemp-range"),
    **_fields(float, "sampling.", "adaptive-target adaptive-decay"),
    **_fields(str, "sampling.", "samplers"),
    **_fields(True, "sampling.", "ignore-eos"),
    "--predict": ("n_predict", int),
    "--keep": ("n_keep", int),
    "--cache-reuse": ("n_cache_reuse", int),
    "--threads-http": ("n_threads_http", int),
    "--no-cont-batching": ("cont_batching", False),
    "--no-cache-prompt": ("cache_prompt", False),
    "--no-cache-idle-slots": ("cache_idle_slots", False),
    "--no-prefill-assistant": ("prefill_assistant", False),
    "--repack": ("no_extra_bufts", False),
    "--no-repack": ("no_extra_bufts", True),
    "--reasoning-format": ("reasoning_format", _reasoning_format),
    "--seed": ("sampling.seed", _seed),
    "--repeat-last-n": ("sampling.penalty_last_n", int),
    "--typical": ("sampling.typ_p", float),
    "--dynatemp-exp": ("sampling.dynatemp_exponent", float),
    "--mirostat-lr": ("sampling.mirostat_eta", float),
    "--mirostat-ent": ("sampling.mirostat_tau", float),
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
# Sampling keys: option of llama-server, field of CommonParamsSampling, bit of its user_sampling_config (which keeps the
# value over the one in the file's metadata; common/common.h).
SAMPLING = {
    "temperature": ("--temp", "temp", "TEMP"),
    "top_p": ("--top-p", "top_p", "TOP_P"),
    "top_k": ("--top-k", "top_k", "TOP_K"),
    "min_p": ("--min-p", "min_p", "MIN_P"),
    "repeat_penalty": ("--repeat-penalty", "penalty_repeat", "PENALTY_REPEAT"),
    "presence_penalty": ("--presence-penalty", "penalty_present", ""),
    "frequency_penalty": ("--frequency-penalty", "penalty_freq", ""),
}
# Options that llama-server takes as `args`, and the embedded engine only as keys.
_SAMPLING_KEYS = {option: name for name, (option, _, _) in SAMPLING.items()} | {"--temperature": "temperature"}

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
            raise ConfigError(f"args: {word} wants {counted(flag.arity, 'value')}", _HINT)
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
