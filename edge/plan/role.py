"""Decide what a model can serve: a file that pools its output, or only encodes, cannot chat. Pure.

Source: llama.cpp 0c1e57098, src/llama-model.cpp (create_memory), tools/server/server-context.cpp (can_split).
"""

from __future__ import annotations

from edge.model.meta import ModelMeta
from edge.plan.layers import ENCODERS, integer

_LAST, _RANK = 3, 4  # llama_pooling_type


def role_of(meta: ModelMeta, requested: str) -> str:
    """Return `requested`, or the role of the file's pooling type where that is chat and the file cannot."""
    if requested != "chat":
        return requested
    pooling = integer(meta, "pooling_type")
    if pooling == _RANK:
        return "rerank"
    return "embedding" if pooling or meta.arch in ENCODERS else "chat"


def in_one_batch(meta: ModelMeta) -> bool:
    """Return whether the whole input has to fit one batch."""
    return meta.arch in ENCODERS or integer(meta, "pooling_type") != _LAST
