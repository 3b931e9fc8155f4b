"""Choose the board of a command: this machine, one by name (`--board`) or a copied tree (`--root`)."""

from __future__ import annotations

from pathlib import Path

from edge.board.board import Board
from edge.board.memory import MemorySnapshot, assumed, snapshot
from edge.board.named import board_by_id
from edge.board.probe import probe
from edge.errors import UsageError


def board_and_memory(
    board_id: str | None, root: Path | None, available_bytes: int | None
) -> tuple[Board, MemorySnapshot]:
    """Return the board and its memory. Raises UsageError for an unknown name, a missing folder, or both options."""
    if board_id is not None and root is not None:
        raise UsageError("--board and --root are two ways to name another board", "give one of them")
    if board_id is not None:
        named = board_by_id(board_id)
        return named, assumed(named, available_bytes)
    place = root or Path("/")
    if not (place / "proc").is_dir():
        raise UsageError(
            f"{place} is no copy of a machine: it has no proc folder",
            "a copy holds its proc, sys, etc, dev and var folders",
        )
    found = probe(place)
    return found, snapshot(place, found, available_bytes)
