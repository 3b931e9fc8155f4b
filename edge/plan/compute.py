"""Estimate the engine's compute buffers. The graph allocator decides; a measured start calibrates it. Pure.

The terms were found on llama.cpp of October 2026 with models of many shapes (tests/plan/test_plan_real_engine.py):
the widest moment of one layer is its feed-forward or its attention, beside rows of embeddings and the attention mask.
"""

from __future__ import annotations

from edge.model.meta import ModelMeta
from edge.plan.kv import Memory, slot_context, window_cells
from edge.plan.layers import ENCODERS, integer
from edge.plan.plan import Settings

_F32, _F16 = 4, 2
_INPUTS = 12  # positions, indices and the like: values a row


def compute_bytes(meta: ModelMeta, memory: Memory, settings: Settings, *, all_logits: bool = False) -> int:
    """Return the bytes where one domain holds all layers. `all_logits`: reserved for every token of a batch."""
    if meta.arch in ENCODERS:
        return _encoder(meta, memory, settings)
    return _device(meta, memory, settings, all_logits) + _rows(settings) * _F32 * 2 * meta.n_embd


def device_compute_bytes(meta: ModelMeta, memory: Memory, settings: Settings, *, all_logits: bool = False) -> int:
    """Return the bytes on a GPU that holds layers; the inputs stay on the host."""
    return _device(meta, memory, settings, all_logits)


def host_compute_bytes(meta: ModelMeta, memory: Memory, settings: Settings) -> int:
    """Return the bytes on the host beside an offloaded model: inputs, mask and output of one batch."""
    return _rows(settings) * _F32 * 2 * meta.n_embd + _mask(memory, settings, _F16) + _output(meta, settings)


def feed_forward(meta: ModelMeta) -> int:
    """Return the values a token of the widest feed-forward: all experts that one token uses."""
    experts = integer(meta, "expert_used_count")
    dense = integer(meta, "feed_forward_length") or 4 * meta.n_embd
    if not experts:
        return dense
    shared = integer(meta, "expert_shared_feed_forward_length")
    return max(experts * (integer(meta, "expert_feed_forward_length") or dense), shared)


def _encoder(meta: ModelMeta, memory: Memory, settings: Settings) -> int:
    """Return the bytes of an encoder: no gate in the feed-forward, no logits."""
    values = 2 * feed_forward(meta) + meta.n_embd + _INPUTS
    return _rows(settings) * _F32 * values + _mask(memory, settings, _F16)


def _device(meta: ModelMeta, memory: Memory, settings: Settings, all_logits: bool) -> int:
    if meta.arch in ENCODERS:
        return _encoder(meta, memory, settings)
    rows, queries = _rows(settings), meta.n_head * meta.key_length
    feed = rows * _F32 * (3 * feed_forward(meta) + 3 * meta.n_embd + _INPUTS)
    if settings.flash_attention == "off":
        cells = slot_context(settings.n_ctx, settings.n_parallel)
        scores = rows * _F32 * meta.n_head * cells
        attention = scores + rows * _F32 * (3 * queries + 2 * meta.n_embd) + _mask(memory, settings, _F32)
        feed += _mask(memory, settings, _F16)
    else:
        attention = rows * _F32 * (2 * queries + 3 * meta.n_embd + _INPUTS) + _mask(memory, settings, _F16)
        feed += _mask(memory, settings, _F16)
    logits = 0
    if all_logits or settings.role != "chat":
        logits = rows * _F32 * ((meta.n_vocab or 0) + 4 * meta.n_embd + _INPUTS) + _mask(memory, settings, _F16)
    return max(feed, attention, logits)


def _mask(memory: Memory, settings: Settings, size: int) -> int:
    cells = slot_context(settings.n_ctx, settings.n_parallel) + window_cells(memory, settings)
    return _rows(settings) * cells * size


def _output(meta: ModelMeta, settings: Settings) -> int:
    return settings.n_parallel * _F32 * (meta.n_vocab or 0)


def _rows(settings: Settings) -> int:
    return min(settings.n_ubatch, settings.n_batch, settings.n_ctx)
