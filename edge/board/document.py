"""Build the JSON document of `edgellm board --json`. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edge.board.board import Board
from edge.board.memory import MemorySnapshot

SCHEMA = 1


def document(board: Board, memory: MemorySnapshot) -> dict[str, Any]:
    """Build the document of a board and its memory."""
    return {"schema": SCHEMA, "board": asdict(board), "memory": asdict(memory)}
