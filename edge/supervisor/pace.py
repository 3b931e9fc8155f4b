"""How fast a model should answer on a board: what the memory can deliver, or what the last good start reached. Pure."""

from __future__ import annotations

from edge.board.board import Board
from edge.model.meta import ModelMeta
from edge.plan.plan import LaunchPlan
from edge.supervisor.terms import Pace

# Of a mixture of experts each token reads its share, and what is not an expert: attention, embeddings, a router.
_ALWAYS_READ = 0.25


def bytes_per_token(meta: ModelMeta) -> float:
    used = meta.extra.get(f"{meta.arch}.expert_used_count")
    if meta.n_expert <= 1 or isinstance(used, (str, bool)) or not used:
        return float(meta.tensor_bytes)
    return meta.tensor_bytes * min(1.0, float(used) / meta.n_expert + _ALWAYS_READ)


def pace(board: Board, meta: ModelMeta, plan: LaunchPlan, last_good_tokens_s: float | None) -> Pace | None:
    """The last good start's on this rung; else the GPU's memory bandwidth over the bytes of one token."""
    if last_good_tokens_s is not None:
        return Pace(last_good_tokens_s, f"the {last_good_tokens_s:.1f} tokens/s of the last good start")
    if board.bandwidth_bytes_s is None or plan.settings.n_gpu_layers <= 0 or not meta.tensor_bytes:
        return None
    tokens_s = board.bandwidth_bytes_s / bytes_per_token(meta)
    return Pace(tokens_s, f"the {tokens_s:.1f} tokens/s that this board's memory allows")
