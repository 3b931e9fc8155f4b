"""Estimate of the engine's compute buffers. Not exact: the graph allocator decides; calibration corrects. Pure."""

from __future__ import annotations

from edge.model.meta import ModelMeta
from edge.plan.kv import slot_context
from edge.plan.plan import Settings

_F32 = 4


def compute_bytes(meta: ModelMeta, settings: Settings) -> int:
    """The compute buffer of the backend that holds the layers."""
    rows = min(settings.n_ubatch, settings.n_batch)
    cells = slot_context(settings.n_ctx, settings.n_parallel) * settings.n_parallel
    mask = 2 * rows * cells
    widest = max(3 * feed_forward(meta), 4 * meta.n_embd)
    return rows * _F32 * (widest + 2 * meta.n_embd) + mask + settings.n_parallel * _F32 * (meta.n_vocab or 0)


def host_compute_bytes(meta: ModelMeta, settings: Settings) -> int:
    """Buffers on the host beside an offloaded model: inputs, mask and embeddings of one batch."""
    rows = min(settings.n_ubatch, settings.n_batch)
    cells = slot_context(settings.n_ctx, settings.n_parallel) * settings.n_parallel
    return rows * (2 * _F32 * meta.n_embd + 2 * cells) + settings.n_parallel * _F32 * (meta.n_vocab or 0)


def feed_forward(meta: ModelMeta) -> int:
    """Width of the feed-forward layer."""
    value = meta.extra.get(f"{meta.arch}.feed_forward_length")
    if isinstance(value, int):
        return value
    return max((tensor.shape[-1] for tensor in meta.tensors if "ffn_up." in tensor.name), default=4 * meta.n_embd)
