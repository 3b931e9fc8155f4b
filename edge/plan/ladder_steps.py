"""The steps of a ladder, as values: KV type, prompt cache, slots and context, from the preset to its limits. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from edge.config.values import Preset
from edge.models.meta import ModelMeta
from edge.plan.kv_cache import BLOCKS, slot_context

# The quantized KV types whose flash-attention kernels are in every CUDA build, also without GGML_CUDA_FA_QUANTS=all.
_KV_STEPS = ("q8_0", "q4_0")


class LadderStep(Struct, frozen=True):
    """The settings that one rung changes. `n_ctx` is over all slots."""

    n_ctx: int
    n_parallel: int
    kv_type_k: str
    kv_type_v: str
    prompt_cache: bool = True


def context_levels(preset: Preset, n_ctx_train: int) -> list[int]:
    """Return the tokens of one slot, halving from the requested context to the preset's smallest."""
    levels = [requested_slot_context(preset, n_ctx_train)]
    # 256 tokens: llama.cpp pads a context to a multiple of it (llama-context.cpp).
    least = min(levels[0], max(256, preset.n_ctx_min))
    while levels[-1] > least:
        levels.append(max(least, slot_context(levels[-1] // 2, 1)))
    return levels


def steps(preset: Preset, meta: ModelMeta, context: int) -> Iterator[LadderStep]:
    """Yield steps with `context` tokens a slot, never above the trained context (FC-22), from the preset to its limits.

    A smaller KV type comes first, then no prompt cache, then fewer slots: each costs a request less than its context.
    Below the requested context there is one slot, with the smallest KV type.
    """
    slots, per_slot = (
        preset.n_parallel,
        slot_context(min(context, usable_context(preset, meta.n_ctx_train) or context), 1),
    )
    kinds = _kv_types(preset)
    if per_slot < requested_slot_context(preset, meta.n_ctx_train):
        slots, kinds = 1, kinds[-1:]
    for key, value in kinds:
        yield LadderStep(per_slot * slots, slots, key, value)
    key, value = kinds[-1]
    if preset.cache_ram:
        yield LadderStep(per_slot * slots, slots, key, value, prompt_cache=False)
    while slots > 1:
        slots //= 2
        for cached in (True, False):
            yield LadderStep(per_slot * slots, slots, key, value, prompt_cache=cached)


def _kv_types(preset: Preset) -> list[tuple[str, str]]:
    """Return the types of K and V from the preset's to its smallest. A quantized V cache needs flash attention."""
    found = [(str(preset.kv_type_k), str(preset.kv_type_v))]
    for smaller in _KV_STEPS:
        if bits(smaller) >= bits(preset.kv_type_min):
            key, value = found[-1]
            found.append((_least(key, smaller), value if preset.flash_attention == "off" else _least(value, smaller)))
    return list(dict.fromkeys(found))


def requested_slot_context(preset: Preset, n_ctx_train: int) -> int:
    """Return the tokens of one slot: as requested, never above the trained context (FC-22) as RoPE extends it."""
    # A file without a trained context has no limit here; 16M tokens is beyond any model.
    trained = usable_context(preset, n_ctx_train) or 1 << 24
    return slot_context(min(preset.n_ctx or trained, trained), 1)


def usable_context(preset: Preset, n_ctx_train: int) -> int:
    """Return the trained context, times rope_scale where the preset extends it; 0 where the file states none."""
    return int(n_ctx_train * max(1.0, preset.rope_scale)) if preset.rope_scaling in ("linear", "yarn") else n_ctx_train


def bits(kind: str) -> float:
    """Return the bits per value of a KV type."""
    size, count = BLOCKS[kind]
    return 8 * size / count


def _least(one: str, other: str) -> str:
    return one if bits(one) <= bits(other) else other
