"""A model in the store. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from edge.model.meta import ModelMeta


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One usable model: a file or a complete split set (`path` is the first shard)."""

    name: str  # the stable public id, without quant: "SmolLM2-135M-Instruct"
    quant: str
    path: str
    shards: tuple[str, ...]
    bytes: int  # of all shards
    fingerprint: str  # changes when a file changes: path, size, mtime
    meta: ModelMeta  # of the whole set: tensors of all shards
    mmproj: str | None = None
    mmproj_bytes: int = 0  # of the projector's file
    notes: tuple[str, ...] = ()  # for the user: unknown architecture, a name with another quantization
