"""Exact size of the KV cache and of recurrent state, as llama.cpp allocates them. Pure.

Source: llama.cpp 0c1e57098, src/llama-kv-cache.cpp, -kv-cache-iswa.cpp, -memory-recurrent.cpp, -hparams.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.model.meta import ModelMeta
from edge.plan.plan import Settings

# ggml: bytes of one block, values in one block.
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
_PAD = 256  # cells are allocated in multiples of it

# Every n-th layer sees the whole context, the others only the window. Other architectures with a window are counted
# as if every layer saw everything: too much is safe. (period, the whole-context layer comes first)
_WINDOW_PERIOD = {
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma4": (6, False),
    "gpt-oss": (2, False),
    "cohere2": (4, False),
    "exaone4": (4, False),
    "olmo2": (4, False),
}


@dataclass(frozen=True, slots=True)
class Cache:
    """Bytes of each layer's cache; `recurrent_bytes` is in it already."""

    by_layer: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.by_layer)


def cache(meta: ModelMeta, settings: Settings) -> Cache:
    """What the engine allocates for these settings. Raises ValueError for an unknown KV type."""
    slots = settings.n_parallel
    full_cells = slot_context(settings.n_ctx, slots)
    window_cells = full_cells
    if meta.sliding_window:
        window_cells = min(full_cells, _padded(meta.sliding_window + settings.n_ubatch))
    windowed = windowed_layers(meta)
    owners = meta.n_layer - int(_extra(meta, "attention.shared_kv_layers"))
    recurrent = recurrent_bytes(meta) * slots
    interval = int(_extra(meta, "full_attention_interval"))
    by_layer = []
    for layer in range(meta.n_layer):
        attends = meta.n_head_kv[layer] > 0 and not (interval > 1 and (layer + 1) % interval)
        if not attends:
            by_layer.append(recurrent)
        elif layer >= owners:
            by_layer.append(0)
        else:
            cells = (window_cells if windowed[layer] else full_cells) * slots
            by_layer.append(cells * _cell_bytes(meta, layer, windowed[layer], settings))
    return Cache(tuple(by_layer))


def slot_context(n_ctx: int, n_parallel: int) -> int:
    """Tokens that one slot gets of `n_ctx` over all slots."""
    return _padded(max(1, n_ctx // n_parallel))


def windowed_layers(meta: ModelMeta) -> tuple[bool, ...]:
    """Which layers see only the sliding window."""
    period, whole_first = _WINDOW_PERIOD.get(meta.arch, (0, False))
    if not meta.sliding_window or not period:
        return (False,) * meta.n_layer
    return tuple((i % period != 0) if whole_first else (i % period < period - 1) for i in range(meta.n_layer))


def recurrent_bytes(meta: ModelMeta) -> int:
    """State of one slot in one recurrent layer (Mamba, gated delta net), in f32. 0 where the model has none."""
    state, inner = int(_extra(meta, "ssm.state_size")), int(_extra(meta, "ssm.inner_size"))
    kernel, groups = int(_extra(meta, "ssm.conv_kernel")), int(_extra(meta, "ssm.group_count"))
    if not inner:
        short = int(_extra(meta, "shortconv.l_cache"))  # LFM2
        return 4 * meta.n_embd * (short - 1) if short else 0
    return 4 * (max(0, kernel - 1) * (inner + 2 * groups * state) + state * inner)


def row_bytes(kind: str, values: int) -> int:
    """Bytes of `values` in a row of this type; rounded up to whole blocks."""
    if kind not in BLOCKS:
        raise ValueError(f"unknown KV type {kind}")
    size, count = BLOCKS[kind]
    return -(-values // count) * size


def _cell_bytes(meta: ModelMeta, layer: int, windowed: bool, settings: Settings) -> int:
    heads, key, value = meta.n_head_kv[layer], meta.key_length, meta.value_length
    if windowed:
        key = int(_extra(meta, "attention.key_length_swa")) or key
        value = int(_extra(meta, "attention.value_length_swa")) or value
    return row_bytes(settings.kv_type_k, heads * key) + row_bytes(settings.kv_type_v, heads * value)


def _extra(meta: ModelMeta, key: str) -> float:
    value = meta.extra.get(f"{meta.arch}.{key}", 0)
    return value if isinstance(value, (int, float)) else 0


def _padded(tokens: int) -> int:
    return -(-tokens // _PAD) * _PAD
