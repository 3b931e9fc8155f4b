"""What a model can serve: a file that pools its output, or only encodes, cannot chat. Pure.

Source: llama.cpp 0c1e57098, src/llama-model.cpp (create_memory), tools/server/server-context.cpp (can_split).
"""

from __future__ import annotations

from edge.model.meta import ModelMeta
from edge.plan.layers import ENCODERS, integer

_LAST, _RANK = 3, 4  # llama_pooling_type


def role_of(meta: ModelMeta, wished: str) -> str:
    """`wished` unless that is chat and the file says otherwise."""
    if wished != "chat":
        return wished
    pooling = integer(meta, "pooling_type")
    if pooling == _RANK:
        return "rerank"
    return "embedding" if pooling or meta.arch in ENCODERS else "chat"


def in_one_batch(meta: ModelMeta) -> bool:
    """Its whole input has to be computed at once: it cannot continue where a batch ended."""
    return meta.arch in ENCODERS or integer(meta, "pooling_type") != _LAST
