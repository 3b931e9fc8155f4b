"""Step down from the preset: smaller KV type, smaller context, fewer slots, no prompt cache. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge.model.meta import ModelMeta
from edge.plan.kv import BLOCKS, slot_context
from edge.profile.profile import Wishes

_KV_STEPS = ("q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Step:
    """The settings that one rung changes. `n_ctx` is over all slots."""

    n_ctx: int
    n_parallel: int
    kv_type_k: str
    kv_type_v: str
    prompt_cache: bool = True


def steps(preset: Wishes, meta: ModelMeta) -> Iterator[Step]:
    """Yield steps from the preset to its limits, each with less memory than the one before."""
    slots = preset.n_parallel
    per_slot = requested_slot_context(preset, meta)
    least = min(per_slot, max(256, preset.n_ctx_min))
    key, value = str(preset.kv_type_k), str(preset.kv_type_v)
    yield Step(per_slot * slots, slots, key, value)
    for smaller in _KV_STEPS:
        if bits(smaller) < bits(preset.kv_type_min):
            break
        # A quantized V cache needs flash attention.
        new = (_least(key, smaller), value if preset.flash_attention == "off" else _least(value, smaller))
        if new != (key, value):
            key, value = new
            yield Step(per_slot * slots, slots, key, value)
    while per_slot > least:
        per_slot = max(least, slot_context(per_slot // 2, 1))
        yield Step(per_slot * slots, slots, key, value)
    while slots > 1:
        slots //= 2
        yield Step(per_slot * slots, slots, key, value)
    if preset.cache_ram:
        yield Step(per_slot * slots, slots, key, value, prompt_cache=False)


def requested_slot_context(preset: Wishes, meta: ModelMeta) -> int:
    """Return the tokens of one slot: as requested, never above the trained context (FC-22)."""
    trained = meta.n_ctx_train or 1 << 24
    wanted = slot_context(preset.n_ctx, preset.n_parallel) if preset.n_ctx else trained
    return slot_context(min(wanted, trained), 1)


def bits(kind: str) -> float:
    """Return the bits per value of a KV type."""
    size, count = BLOCKS[kind]
    return 8 * size / count


def _least(one: str, other: str) -> str:
    return one if bits(one) <= bits(other) else other
