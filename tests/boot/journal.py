"""What journald has of a board's service."""

from __future__ import annotations

import json
from typing import Any

from tests.boot.board import UNIT, Board


def entries(board: Board, *filters: str) -> list[dict[str, Any]]:
    """Of this boot, as journald has them: --sync returns when all that was sent until now can be read."""
    board.run("journalctl", "--sync")
    out = board.run("journalctl", "-u", UNIT, "-b", "-o", "json", *filters, check=False)
    return [json.loads(line) for line in out.splitlines()]
