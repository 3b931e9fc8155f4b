"""Quantization: ggml's tensor types, GGUF's file types, the tags in file names, and which of several to take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from msgspec import Struct


class Quantized(Protocol):
    """One quantization of a model: a file, a catalogue row's entry, an option of a repository."""

    @property
    def quant(self) -> str: ...

    @property
    def bytes(self) -> int: ...


Q = TypeVar("Q", bound=Quantized)


class QuantPreference(Struct, frozen=True):
    """A preset's `quant` and `prefer` ("balanced" | "quality" | "speed")."""

    quant: str = "Q5_K_M"
    prefer: str = "balanced"


class TensorType(Struct, frozen=True):
    """A ggml type: `block` weights are stored together in `bytes` bytes."""

    name: str
    block: int
    bytes: int

    @property
    def bits(self) -> float:
        """Return the bits per weight."""
        return self.bytes * 8 / self.block


# ggml's enum ggml_type: number -> name, weights a block, bytes a block.
TENSOR_TYPES: dict[int, TensorType] = {
    number: TensorType(name, block, size)
    for number, name, block, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
        (42, "Q2_0", 64, 18),
    )
}

# Numbers that ggml once used and has given up: no current engine reads such a file.
REMOVED_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})

# general.file_type (llama_ftype) -> the label of the mix.
FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}
_GUESSED = 1024  # LLAMA_FTYPE_GUESSED, a flag on top of the number

UNKNOWN = "unknown"
# What llama-quantize takes for rows that a type's 256-blocks do not divide: tensor_type_fallback, src/llama-quant.cpp.
_FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_FALLBACK |= dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_XS"), "IQ4_NL")

# Below four bits llama.cpp's own perplexity tables (tools/quantize/README.md) show a loss that a reader notices: such a
# quantization comes after every larger one.
_LEAST_BITS = 4
# ggml's first block formats: at equal bits the K-quants lose less (same tables).
_LEGACY = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1"})

_TAG = re.compile(
    r"(?<![A-Za-z0-9])(?P<ud>UD[-_])?(?P<tag>"
    r"IQ[1-4]_(?:XXS|XS|NL|S|M)|TQ[12]_0|Q[2-8]_K(?:_(?:XXL|XL|L|M|S))?|Q[2-8]_[01](?:_[48]_[48])?|Q1_0"
    r"|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)
# LLAMA_SPLIT's pattern %s-%05d-of-%05d.gguf, src/llama.cpp.
_SHARD = re.compile(r"-(?P<no>\d{5})-of-(?P<count>\d{5})$")


def order(candidates: Iterable[Q], wanted: QuantPreference | None = None) -> list[Q]:
    """Sort the quantizations of one model, best first.

    The wanted one, then smaller ones, then larger ones, then those under four bits and unknown ones. `quality` puts
    the larger ones first, largest at the head; `speed` the smaller ones. Of equal ones the first given comes first.
    """
    wanted = wanted or QuantPreference()
    limit = bits(wanted.quant)
    ranked = sorted(candidates, key=lambda one: (-bits(one.quant), plain(one.quant) in _LEGACY, -one.bytes))
    exact = [one for one in ranked if plain(one.quant) == plain(wanted.quant)]
    others = [one for one in ranked if plain(one.quant) != plain(wanted.quant)]
    larger = [one for one in others if bits(one.quant) > limit]
    smaller = [one for one in others if _LEAST_BITS <= bits(one.quant) <= limit]
    least = [one for one in others if bits(one.quant) < _LEAST_BITS and bits(one.quant) <= limit]
    if wanted.prefer == "quality":
        return [*larger, *exact, *smaller, *least]
    if wanted.prefer == "speed":
        return [*smaller, *exact, *larger[::-1], *least]
    return [*exact, *smaller, *larger[::-1], *least]


def select(candidates: Iterable[Q], wanted: QuantPreference | None = None, room_bytes: int | None = None) -> Q | None:
    """Return the best quantization by `order` whose weights take at most `room_bytes`; None when there is none."""
    return next((one for one in order(candidates, wanted) if room_bytes is None or one.bytes <= room_bytes), None)


def matching(candidates: Iterable[Q], tag: str) -> list[Q]:
    """Return the candidates that `tag` names: the exact label first, then the publisher's variant (`UD-`)."""
    label = canonical(tag)
    return sorted((one for one in candidates if is_named(one.quant, label)), key=lambda one: one.quant != label)


def is_named(quant: str, tag: str) -> bool:
    """Return whether a request for `tag` may be served with `quant`: Q4_K_M names UD-Q4_K_M too."""
    label = canonical(tag)
    return label in (canonical(quant), plain(quant))


def plain(quant: str) -> str:
    """Return the label without the publisher's prefix: `UD-Q4_K_M` -> `Q4_K_M`."""
    return canonical(quant).removeprefix("UD-")


def bits(quant: str) -> int:
    """Return the number in a quantization's name: Q5_K_M is 5, MXFP4 4, F16 16; 0 when there is none."""
    digits = "".join(c for c in plain(quant).split("_")[0] if c.isdigit())
    return int(digits) if digits else 0


def file_type_label(file_type: int | None) -> str:
    return FILE_TYPES.get(file_type & ~_GUESSED, UNKNOWN) if file_type is not None else UNKNOWN


def base_types(label: str) -> frozenset[str]:
    """Return the tensor types that a label requires: Q5_K_M -> {Q5_K}."""
    mix = plain(label)
    if mix in ("IQ3_XS", "IQ3_M"):
        return frozenset({"IQ3_XXS", "IQ3_S"})
    if mix == "IQ2_M":
        return frozenset({"IQ2_S", "IQ2_XS"})
    return frozenset({re.sub(r"_K_(?:S|M|L|XL|XXL)$", "_K", mix)})


def confirms(label: str, bytes_by_type: Mapping[str, int]) -> bool:
    """Return whether weights of these types may carry the label.

    They may if its base types hold the most bytes, or a third of them at about the label's bits per weight: Q3_K_L has
    as many bytes in Q5_K as in Q3_K, and one Q4_K matrix in a file of 2-bit tensors makes no Q4_K_S.
    """
    base = base_types(label)
    own = base | {_FALLBACK[name] for name in base if name in _FALLBACK}
    total = sum(bytes_by_type.values())
    mine = sum(bytes_by_type.get(name, 0) for name in own)
    if mine >= max((count for name, count in bytes_by_type.items() if name not in own), default=0):
        return True
    sizes = {kind.name: kind.bits for kind in TENSOR_TYPES.values()}
    nominal = [sizes[name] for name in base if name in sizes]
    if mine * 3 < total or not nominal or not bytes_by_type.keys() <= sizes.keys():
        return False
    average = total / sum(count / sizes[name] for name, count in bytes_by_type.items())
    return 0.75 * max(nominal) <= average <= 1.35 * min(nominal)


def canonical(tag: str) -> str:
    """Return the canonical spelling: `ud-q4_k_m` -> `UD-Q4_K_M`, `fp16` -> `F16`, `MXFP4_MOE` -> `MXFP4`."""
    upper = tag.upper().replace("UD_", "UD-")
    return {"FP16": "F16", "FP32": "F32", "MXFP4_MOE": "MXFP4"}.get(upper, upper)


def label_from_name(name: str) -> str:
    """Return the last quantization tag in a file name or path, else `unknown`.

    A file name without a tag takes that of its folder (`Q4_K_M/model-00001-of-00003.gguf`).
    """
    for part in reversed(name.replace("\\", "/").split("/")):
        found = list(_TAG.finditer(part))
        if found:
            return canonical((found[-1]["ud"] or "") + found[-1]["tag"])
    return UNKNOWN


def shard_of(stem: str) -> tuple[int, int] | None:
    """Return number and count of a shard: `model-00002-of-00005` -> (2, 5); None for other names."""
    match = _SHARD.search(stem)
    return (int(match["no"]), int(match["count"])) if match else None


def public_name(path: str) -> str:
    """Return a stable id from a file name, without folder, `.gguf`, shard number and quantization."""
    folder, _, file = path.replace("\\", "/").rpartition("/")
    stem = _SHARD.sub("", file[: -len(".gguf")] if file.lower().endswith(".gguf") else file)
    found = list(_TAG.finditer(stem))
    if found:
        before, after = stem[: found[-1].start()], stem[found[-1].end() :]
        stem = before.rstrip("-_. ") + after
    plain_text = "".join(c if c.isprintable() else "-" for c in stem)
    name = re.sub(r"[\s:/]+", "-", plain_text.strip("-_. "))
    if not name and folder:
        return public_name(folder.rpartition("/")[2] + ".gguf")
    return name or "model"


# Architecture names of llama.cpp 0c1e57098 (src/llama-arch.cpp). An unknown one is no error: the engine decides.

_KNOWN = """
afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bert bitnet bloom chameleon
chatglm clip codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32
deepseek4 dflash dots1 dots3note dream eagle3 ernie4_5 ernie4_5-moe eurobert exaone exaone-moe exaone4 falcon
falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 gemma4-assistant glm-dsa glm4 glm4moe glm5-next
gpt-oss gpt2 gptj gptneox granite granite_swa granitehybrid granitemoe graniteswitch grok grovemoe hrm_text
hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba jina-bert-v2 jina-bert-v3 kimi-k3
kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama-embed llama4 maincoder mamba mamba2 maple mellum
mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 modern-bert mpt muse-glimmer nanbeige
nemotron nemotron_h nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion paddleocr
pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm pockettts qwen qwen2 qwen2moe qwen2vl qwen3 qwen35
qwen35moe qwen3moe qwen3next qwen3tts qwen3vl qwen3vlmoe qwen4exp refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss
smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 t5 t5encoder talkie wavtokenizer-dec xverse
"""
KNOWN = frozenset(_KNOWN.split())


def types_note(types: Iterable[str]) -> str | None:
    """Return a note on tensor types that are newer than TENSOR_TYPES, else None."""
    newer = sorted({kind.removeprefix("TYPE") for kind in types if kind.startswith("TYPE")})
    if not newer:
        return None
    return f"tensor type {', '.join(newer)} is newer than edgellm's list; the engine decides whether it loads"


def arch_note(arch: str) -> str | None:
    """Return a note on an architecture that is not in the list, else None."""
    unknown = f"architecture {arch!r} is not in edgellm's list; the engine decides whether it loads"
    return None if arch in KNOWN else unknown
