"""Compute the exact size of the KV cache and of recurrent state, as llama.cpp allocates them. Pure.

Source: llama.cpp 0c1e57098, src/llama-kv-cache.cpp, -kv-cache-iswa.cpp, -memory-recurrent.cpp, -context.cpp.
"""

from __future__ import annotations

from msgspec import Struct

from edge.models.meta import ModelMeta
from edge.plan.plan import Settings

# Find what each layer of a model caches: the whole context, a window, a recurrent state, or nothing. Pure.

# Every n-th layer sees the whole context, the others only the window: period, and whether the whole one comes first.
# A pattern in the file wins. Other architectures with a window keep the whole context in every layer.
_PERIODS = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma4": (6, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),
    "mellum": (4, False),
    "muse-glimmer": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
# Set by llama.cpp where the file does not (exaone4, gemma2), or whatever it has.
_WINDOWS = {"exaone4": 4096, "gemma2": 4096}
_FIXED_WINDOWS = {"llama4": 8192, "smallthinker": 4096}
# One layer in so many attends, the others are recurrent.
_INTERVALS = {"minimax-01": 8, "qwen35": 4, "qwen35moe": 4, "qwen3next": 4, "qwen4exp": 4}
# Their layers keep the keys of an indexer (one head) beside the attention's: all, or those that `indexer.types` marks.
_INDEXED = frozenset({"deepseek32", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3", "qwen4exp"})
_BOTH = frozenset({"falcon-h1"})  # attention and state in every layer
# They compute their input in one batch and cache nothing.
ENCODERS = frozenset({"bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert"})
ENCODERS |= {"modern-bert", "gemma-embedding", "dream", "llada", "llada-moe", "rnd1", "wavtokenizer-dec"}
_OWNERS = {"gemma3n": 20}  # layers from the start that have a cache of their own


class LayerShape(Struct, frozen=True):
    """The cache of one layer. `cells`: "full" | "window" | "none"; `key`, `value`: values a cell, over all heads."""

    cells: str
    key: int
    value: int
    recurrent: bool


def layers(meta: ModelMeta) -> tuple[LayerShape, ...]:
    """Return one entry for each layer that the engine runs, without those for multi-token prediction."""
    count = meta.n_layer - integer(meta, "nextn_predict_layers")
    owners = _OWNERS.get(meta.arch, count - integer(meta, "attention.shared_kv_layers"))
    windowed = _windowed(meta, count)
    recurrent = _recurrent(meta, count)
    return tuple(_layer(meta, i, windowed[i], recurrent[i], i < owners) for i in range(count))


def window(meta: ModelMeta) -> int:
    """Return the tokens of the sliding window; 0 is none."""
    if meta.arch in ("phi3", "phimoe") or (meta.arch == "exaone4" and meta.n_layer != 64):
        return 0  # llama.cpp switches it off: no file of phi3 has a usable pattern, small exaone4 have none
    if meta.arch in _FIXED_WINDOWS:
        return _FIXED_WINDOWS[meta.arch] if meta.sliding_window != 0 else 0
    return _WINDOWS.get(meta.arch, 0) if meta.sliding_window is None else meta.sliding_window


def state_values(meta: ModelMeta) -> int:
    """Return the f32 values of one slot's state in one recurrent layer."""
    if head := integer(meta, "wkv.head_size"):  # RWKV
        return meta.n_embd * (head + (integer(meta, "token_shift_count") or 2))
    if length := integer(meta, "shortconv.l_cache"):  # LFM2
        return meta.n_embd * (length - 1)
    if head := integer(meta, "kda.head_dim"):  # Kimi's delta attention: a matrix a head, convolutions of Q, K and V
        kernel = integer(meta, "ssm.conv_kernel") or 4
        return meta.n_head * head * (3 * (kernel - 1) + head)
    if meta.arch == "minimax-01":
        return meta.key_length * meta.key_length * meta.n_head
    inner, state = integer(meta, "ssm.inner_size"), integer(meta, "ssm.state_size")
    convolution = max(0, integer(meta, "ssm.conv_kernel") - 1) * (inner + 2 * integer(meta, "ssm.group_count") * state)
    return convolution + state * inner


def integer(meta: ModelMeta, key: str) -> int:
    """Return a number of this architecture's keys; the largest where it is per layer, 0 where it is absent."""
    values = per_layer(meta, key)
    if values:
        return max(values)
    value = meta.extra.get(f"{meta.arch}.{key}", 0)
    return int(value) if isinstance(value, (int, float)) else 0


def per_layer(meta: ModelMeta, key: str) -> tuple[int, ...]:
    return tuple(int(value) for value in meta.arrays.get(f"{meta.arch}.{key}", ()))


def _layer(meta: ModelMeta, index: int, windowed: bool, recurrent: bool, owner: bool) -> LayerShape:
    heads = meta.n_head_kv[index]
    attends = heads > 0 and owner and meta.arch not in ENCODERS and (not recurrent or meta.arch in _BOTH)
    key, value = meta.key_length, meta.value_length
    if windowed:
        key = integer(meta, "attention.key_length_swa") or key
        value = integer(meta, "attention.value_length_swa") or value
    if integer(meta, "attention.key_length_mla"):  # latent attention keeps one compressed row, no V
        value = 0
    cells = "none" if not attends else "window" if windowed else "full"
    return LayerShape(cells, heads * key + _index_keys(meta, index), heads * value, recurrent)


def _index_keys(meta: ModelMeta, index: int) -> int:
    """Return the values a cell of the sparse attention's indexer (llama-kv-cache-dsa.cpp)."""
    if meta.arch not in _INDEXED:
        return 0
    marked = per_layer(meta, "attention.indexer.types")
    dense = integer(meta, "leading_dense_block_count") if meta.arch == "minimax-m3" else 0
    owns = bool(marked[index]) if index < len(marked) else index >= dense
    return integer(meta, "attention.indexer.key_length") if owns else 0


def _windowed(meta: ModelMeta, count: int) -> tuple[bool, ...]:
    pattern = per_layer(meta, "attention.sliding_window_pattern")
    if not window(meta):
        return (False,) * count
    if pattern:  # a shorter one leaves the rest whole, as llama.cpp's zeroed array does
        return tuple(index < len(pattern) and bool(pattern[index]) for index in range(count))
    if meta.arch in ("lfm2", "lfm2moe"):
        return tuple(heads > 0 for heads in meta.n_head_kv[:count])
    if meta.arch not in _PERIODS:
        return (False,) * count
    period, whole_first = _PERIODS[meta.arch]
    period = integer(meta, "attention.sliding_window_pattern") or period
    return tuple((i % period != 0) if whole_first else (i % period < period - 1) for i in range(count))


def _recurrent(meta: ModelMeta, count: int) -> tuple[bool, ...]:
    if meta.arch in _BOTH:
        return (True,) * count
    if not state_values(meta):
        return (False,) * count
    named = per_layer(meta, "attention.recurrent_layers")
    if len(named) >= count:
        return tuple(bool(value) for value in named[:count])
    interval = integer(meta, "full_attention_interval") or _INTERVALS.get(meta.arch, 0)
    if interval:
        return tuple((i + 1) % interval != 0 for i in range(count))
    # A layer without attention is recurrent, unless it is a feed-forward of its own (Nemotron-H).
    widths = per_layer(meta, "feed_forward_length") if meta.arch.startswith("nemotron_h") else ()
    return tuple(meta.n_head_kv[i] == 0 and not (widths and widths[i]) for i in range(count))


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
PLAIN_KV = ("f32", "f16", "bf16")  # types that need no flash attention
_PAD = 256  # llama-context.cpp rounds a slot's cells up to it
_F32 = 4


class KvBytes(Struct, frozen=True):
    """What each layer of a model caches, independent of settings."""

    layers: tuple[LayerShape, ...]
    window: int
    state_bytes: int  # of one slot in one recurrent layer

    @property
    def needs_checkpoints(self) -> bool:
        """Return whether the engine keeps snapshots to reuse a prompt: a window or a state cannot be rolled back."""
        return any(layer.recurrent or layer.cells == "window" for layer in self.layers)


def memory_of(meta: ModelMeta) -> KvBytes:
    return KvBytes(layers(meta), window(meta), _F32 * state_values(meta))


def cache_by_layer(memory: KvBytes, settings: Settings) -> tuple[int, ...]:
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


def checkpoint_bytes(memory: KvBytes, settings: Settings) -> int:
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


def window_cells(memory: KvBytes, settings: Settings) -> int:
    """Return the cells a slot of the windowed layers; 0 where there are none."""
    return _cells(memory, settings)["window"] if any(layer.cells == "window" for layer in memory.layers) else 0


def _cells(memory: KvBytes, settings: Settings) -> dict[str, int]:
    full = slot_context(settings.n_ctx, settings.n_parallel)
    narrow = min(full, _padded(memory.window + settings.n_ubatch)) if memory.window else full
    return {"full": full, "window": narrow}


def _padded(tokens: int) -> int:
    return -(-tokens // _PAD) * _PAD
