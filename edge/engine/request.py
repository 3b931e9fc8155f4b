"""A build request, its plan and its result. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.board.board import Board
from edge.engine.commands import Commands, Inputs
from edge.engine.pin import Pin, SourceChoice
from edge.engine.preflight import Preflight
from edge.engine.recipe import Recipe
from edge.engine.source import Source
from edge.folders import Folders


@dataclass(frozen=True, slots=True)
class Request:
    """A build request. `stand_in`: the board comes from --board, so this machine is not checked and builds nothing."""

    folders: Folders
    board: Board
    environment: Mapping[str, str]
    recipe: str | None = None  # a name, the path of a .cmake file, or None for the board's
    source: SourceChoice = field(default_factory=lambda: SourceChoice("pypi"))
    jobs: int | None = None
    arch: tuple[int, ...] = ()
    force: bool = False
    fetch_tools: bool = False
    stand_in: bool = False
    native: bool = True  # compile for this CPU; False for any CPU of its kind
    root: Path = Path("/")

    @property
    def source_dir(self) -> Path:
        # Real paths: cmake and ccache remember them, and a symlink that moves would make all of it new.
        return self.folders.cache.resolve() / "src"

    @property
    def build_root(self) -> Path:
        return self.folders.cache.resolve() / "build"

    @property
    def tools_dir(self) -> Path:
        return self.folders.cache / "tools"


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """All decisions of a build, made before the first byte is fetched."""

    recipe: Recipe
    pin: Pin
    source: Source
    arch: tuple[int, ...]
    preflight: Preflight
    inputs: Inputs
    commands: Commands
    minutes: int
    drop: tuple[str, ...]
    table: Mapping[str, Any]
    built: str | None = None  # the installed engine with this fingerprint


@dataclass(frozen=True, slots=True)
class Result:
    """The result. `new` is False if the fingerprint was built before."""

    engine_id: str
    new: bool
    previous: str | None
    log: str | None = None
    took_s: float = 0.0
    notes: tuple[str, ...] = ()
