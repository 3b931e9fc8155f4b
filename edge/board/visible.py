"""Apply CUDA_VISIBLE_DEVICES of our environment: the engine inherits it and must not plan for hidden GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.board.board import Board, Gpu

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(board: Board, value: str | None) -> Board:
    """Return the board with its visible GPUs. `value` None: the variable is not set."""
    if value is None or not board.gpus:
        return board
    left = _left(board.gpus, [token.strip() for token in value.split(",")])
    if left:
        return replace(board, gpus=left)
    return replace(board, gpus=(), refused=f"{VARIABLE} hides every GPU")


def _left(gpus: Sequence[Gpu], tokens: Sequence[str]) -> tuple[Gpu, ...]:
    """Select by number in PCI order or by a prefix of the UUID. As in CUDA, the first invalid entry ends the list."""
    ordered = sorted(gpus, key=lambda gpu: gpu.pci_bus_id or "")
    found: list[Gpu] = []
    for token in tokens:
        gpu = _one(ordered, token)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return tuple(found)


def _one(gpus: Sequence[Gpu], token: str) -> Gpu | None:
    if token.isdecimal():
        return gpus[int(token)] if int(token) < len(gpus) else None
    matches = [gpu for gpu in gpus if token and gpu.uuid and gpu.uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None
