"""Check split sets: names and headers of the shards must agree before an engine opens them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.model.meta import ModelMeta
from edge.model.quant import shard_of
from edge.model.verdict import PULL_AGAIN, Verdict


def missing_shards(missing: Sequence[str]) -> Verdict:
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    many = "s" if len(missing) != 1 else ""
    return Verdict("missing_shards", f"lacks {len(missing)} shard{many} of its set: {shown}", PULL_AGAIN)


def judge_shard(stem: str, meta: ModelMeta) -> Verdict | None:
    """Compare a shard's name with its header: the engine derives the other shards' names from the first."""
    named = shard_of(stem)
    if meta.split is None:
        return None
    number, count = meta.split.no + 1, meta.split.count
    proper = f"-{number:05d}-of-{count:05d}.gguf"
    if named is None:
        sentence = f"is shard {number} of {count} of a set, under a name without shard number"
        return Verdict("renamed_shard", sentence, f"name it so that it ends in {proper}, beside the other shards")
    if named != (number, count):
        sentence = f"is named shard {named[0]} of {named[1]}, but its header has {number} of {count}"
        return Verdict("wrong_shard", sentence, f"rename it so that it ends in {proper}")
    return None


def merge(metas: Sequence[ModelMeta]) -> ModelMeta:
    """Merge the headers of a set: keys of the first shard, tensors and sizes of all, offsets within each shard."""
    first = metas[0]
    if len(metas) == 1:
        return first
    return replace(
        first,
        tensors=tuple(tensor for meta in metas for tensor in meta.tensors),
        tensor_bytes=sum(meta.tensor_bytes for meta in metas),
        file_bytes=sum(meta.file_bytes for meta in metas),
    )
