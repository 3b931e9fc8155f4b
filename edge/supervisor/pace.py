"""Estimate how fast a model should answer on a board: from its memory bandwidth, or from the last good start. Pure."""

from __future__ import annotations

from edge.board.board import Board
from edge.model.meta import ModelMeta
from edge.plan.plan import LaunchPlan
from edge.supervisor.terms import ExpectedSpeed

# A mixture of experts reads its active experts for each token, and the rest (attention, embeddings, router) always.
_ALWAYS_READ = 0.25


def bytes_per_token(meta: ModelMeta) -> float:
    """Return how many bytes of weights one generated token reads."""
    used = meta.extra.get(f"{meta.arch}.expert_used_count")
    if meta.n_expert <= 1 or isinstance(used, (str, bool)) or not used:
        return float(meta.tensor_bytes)
    return meta.tensor_bytes * min(1.0, float(used) / meta.n_expert + _ALWAYS_READ)


def expected_speed(
    board: Board, meta: ModelMeta, plan: LaunchPlan, last_good_tokens_s: float | None
) -> ExpectedSpeed | None:
    """Return the last good start's speed on this rung, else bandwidth over bytes per token; None if neither is known.

    Generation is bound by memory bandwidth on every Jetson; without offload the CPU is, and nothing is expected.
    """
    if last_good_tokens_s is not None:
        return ExpectedSpeed(last_good_tokens_s, f"the {last_good_tokens_s:.1f} tokens/s of the last good start")
    if board.bandwidth_bytes_s is None or plan.settings.n_gpu_layers <= 0 or not meta.tensor_bytes:
        return None
    tokens_s = board.bandwidth_bytes_s / bytes_per_token(meta)
    return ExpectedSpeed(tokens_s, f"the {tokens_s:.1f} tokens/s that this board's memory allows")
