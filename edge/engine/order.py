"""Turn the options of `edgellm build` (profile, board, recipe) into a build request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edge.board.board import Board
from edge.board.named import board_by_id
from edge.board.probe import probe
from edge.engine.pin import parse_source
from edge.engine.request import Request
from edge.errors import UsageError
from edge.folders import Folders
from edge.profile.loader import load_profile
from edge.profile.resolve import choose
from edge.units import parse_size


@dataclass(frozen=True, slots=True)
class Order:
    """The options of `edgellm build`."""

    profile: str | None = None
    board: str | None = None
    recipe: str | None = None
    source: str = "pypi"
    jobs: int | None = None
    arch: str | None = None
    root: str | None = None
    memory: str | None = None
    force: bool = False
    fetch_tools: bool = False
    native: bool = True


def request_for(order: Order, folders: Folders, environment: Mapping[str, str]) -> Request:
    """Resolve the options. Raises UsageError or ConfigError for unknown names."""
    root = Path(order.root) if order.root else Path("/")
    board = _board(order, root)
    return Request(
        folders=folders,
        board=board,
        environment=environment,
        recipe=order.recipe or _recipe_of(order.profile, board, folders),
        source=parse_source(order.source),
        jobs=order.jobs,
        arch=parse_arch(order.arch),
        force=order.force,
        fetch_tools=order.fetch_tools,
        stand_in=order.board is not None,
        native=order.native,
        root=root,
    )


def _board(order: Order, root: Path) -> Board:
    board = board_by_id(order.board) if order.board else probe(root)
    return replace(board, memory_bytes=parse_size(order.memory)) if order.memory else board


def _recipe_of(profile: str | None, board: Board, folders: Folders) -> str | None:
    """Return a profile's recipe; None for `auto` or no profile: the board's GPU decides."""
    if profile is None or profile == "auto":
        return None
    loaded = load_profile(profile, folders)
    if loaded.choices:
        loaded = load_profile(choose(loaded, board), folders)
    return loaded.wishes.recipe or None


def parse_arch(text: str | None) -> tuple[int, ...]:
    """Parse `90`, `9.0`, `sm_90` or several with commas. Numbers only reach cmake (FC-02)."""
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:sm_)?(\d{2,3})|(\d{1,2})\.(\d)", part.strip())
        if match is None:
            raise UsageError(f"--arch {text}: not a GPU architecture", "write it like 87, 90 or 9.0")
        found.append(int(match[1] or match[2] + match[3]))
    return tuple(sorted(set(found)))
