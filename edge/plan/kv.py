"""Compute the exact size of the KV cache and of recurrent state, as llama.cpp allocates them. Pure.

Source: llama.cpp 0c1e57098, src/llama-kv-cache.cpp, -kv-cache-iswa.cpp, -memory-recurrent.cpp, -context.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.model.meta import ModelMeta
from edge.plan.layers import Layer, layers, state_values, window
from edge.plan.plan import Settings

# ggml-common.h: bytes of one block, values in one block.
BLOCKS = {
    "f32": (4, 1),
    "f16": (2, 1),
    "bf16": (2, 1),
    "q8_0": (34, 32),
    "q5_1": (24, 32),
    "q5_0": (22, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
    "iq4_nl": (18, 32),
}
_PAD = 256  # llama-context.cpp rounds a slot's cells up to it
_F32 = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """What each layer of a model caches, independent of settings."""

    layers: tuple[Layer, ...]
    window: int
    state_bytes: int  # of one slot in one recurrent layer

    @property
    def needs_checkpoints(self) -> bool:
        """Whether the engine keeps snapshots to reuse a prompt: a window or a state cannot be rolled back."""
        return any(layer.recurrent or layer.cells == "window" for layer in self.layers)


def memory_of(meta: ModelMeta) -> Memory:
    return Memory(layers(meta), window(meta), _F32 * state_values(meta))


def cache_by_layer(memory: Memory, settings: Settings) -> tuple[int, ...]:
    """Return the bytes of each layer's cache and state. Raises ValueError for an unknown KV type."""
    slots = settings.n_parallel
    cells = _cells(memory, settings)
    # Without flash attention V is kept transposed, every layer as wide as the widest.
    widest = max((layer.value for layer in memory.layers), default=0)
    sizes = []
    for layer in memory.layers:
        size = memory.state_bytes * slots if layer.recurrent else 0
        if layer.cells != "none":
            value = widest if settings.flash_attention == "off" else layer.value
            row = row_bytes(settings.kv_type_k, layer.key) + row_bytes(settings.kv_type_v, value)
            size += cells[layer.cells] * slots * row
        sizes.append(size)
    return tuple(sizes)


def checkpoint_bytes(memory: Memory, settings: Settings) -> int:
    """Return the bytes of one snapshot of one slot: its windowed cells and states."""
    cells = _cells(memory, settings)["window"]
    size = sum(memory.state_bytes for layer in memory.layers if layer.recurrent)
    for layer in memory.layers:
        if layer.cells == "window":
            size += cells * (row_bytes(settings.kv_type_k, layer.key) + row_bytes(settings.kv_type_v, layer.value))
    return size


def slot_context(n_ctx: int, n_parallel: int) -> int:
    """Return the tokens that one slot gets of `n_ctx` over all slots."""
    return _padded(max(1, n_ctx // n_parallel))


def row_bytes(kind: str, values: int) -> int:
    """Return the bytes of a row of `values` in this type, in whole blocks. Raises ValueError for an unknown type."""
    if kind not in BLOCKS:
        raise ValueError(f"unknown KV type {kind}")
    size, count = BLOCKS[kind]
    return -(-values // count) * size


def window_cells(memory: Memory, settings: Settings) -> int:
    """Return the cells a slot of the windowed layers; 0 where there are none."""
    return _cells(memory, settings)["window"] if any(layer.cells == "window" for layer in memory.layers) else 0


def _cells(memory: Memory, settings: Settings) -> dict[str, int]:
    full = slot_context(settings.n_ctx, settings.n_parallel)
    narrow = min(full, _padded(memory.window + settings.n_ubatch)) if memory.window else full
    return {"full": full, "window": narrow}


def _padded(tokens: int) -> int:
    return -(-tokens // _PAD) * _PAD
