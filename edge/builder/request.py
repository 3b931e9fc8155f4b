"""A build request, its plan and its result. Values only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from edge.board.board import Board
from edge.board.named import board_by_id
from edge.board.probe import probe
from edge.builder.commands import BuildInputs, Commands
from edge.builder.preflight import Preflight
from edge.builder.recipe import Recipe, includes, make_recipe, recipe_name
from edge.builder.source import Pin, SourceArchive, SourceChoice, parse_source
from edge.config.profile import choose, load_profile
from edge.errors import UsageError
from edge.linux.files import read_bounded
from edge.paths import Folders
from edge.resources import data_dir
from edge.units import parse_size


class BuildRequest(Struct, frozen=True):
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
    rpc: bool = False  # with llama.cpp's RPC backend
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


class BuildPlan(Struct, frozen=True):
    """All decisions of a build, made before the first byte is fetched."""

    recipe: Recipe
    pin: Pin
    source: SourceArchive
    arch: tuple[int, ...]
    preflight: Preflight
    inputs: BuildInputs
    commands: Commands
    minutes: int
    drop: tuple[str, ...]
    table: Mapping[str, Any]
    built: str | None = None  # the installed engine with this fingerprint


class BuildResult(Struct, frozen=True):
    """The result. `new` is False if the fingerprint was built before."""

    engine_id: str
    new: bool
    previous: str | None
    log: str | None = None
    took_s: float = 0.0
    notes: tuple[str, ...] = ()


# Turn the options of `edgellm build` (profile, board, recipe) into a build request.


class BuildOptions(Struct, frozen=True):
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
    rpc: bool = False


def request_for(options: BuildOptions, folders: Folders, environment: Mapping[str, str]) -> BuildRequest:
    """Resolve the options. Raises UsageError or ConfigError for unknown names."""
    root = Path(options.root) if options.root else Path("/")
    board = _board(options, root)
    return BuildRequest(
        folders=folders,
        board=board,
        environment=environment,
        recipe=options.recipe or _recipe_of(options.profile, board, folders),
        source=parse_source(options.source),
        jobs=options.jobs,
        arch=parse_arch(options.arch),
        force=options.force,
        fetch_tools=options.fetch_tools,
        stand_in=options.board is not None,
        native=options.native,
        rpc=options.rpc,
        root=root,
    )


def _board(options: BuildOptions, root: Path) -> Board:
    board = board_by_id(options.board) if options.board else probe(root)
    return replace(board, memory_bytes=parse_size(options.memory)) if options.memory else board


def _recipe_of(profile: str | None, board: Board, folders: Folders) -> str | None:
    """Return a profile's recipe; None for `auto` or no profile: the board's GPU decides."""
    if profile is None or profile == "auto":
        return None
    loaded = load_profile(profile, folders)
    if loaded.choices:
        loaded = load_profile(choose(loaded, board), folders)
    return loaded.preset.recipe or None


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


# Find a recipe in the user's configuration folder, in a file, or among the shipped ones.


def find_recipe(request: BuildRequest, table: Mapping[str, Any]) -> Recipe:
    """Read the recipe of --recipe or the profile (name or file), else the board's; the user's folder comes first."""
    wanted = request.recipe
    if wanted and wanted.endswith(".cmake"):
        return _read_recipe(Path(wanted).stem, Path(wanted).expanduser().resolve(), {})
    board = request.board
    name = wanted or recipe_name(table, board.compute_capability, bool(board.gpus))
    known = table["recipes"].get(name)
    if known is None:
        raise UsageError(
            f"no recipe is called {name}", f"one of {', '.join(table['recipes'])}, or the path of a .cmake file"
        )
    own = request.folders.config / "build" / f"{name}.cmake"
    return _read_recipe(name, own if own.is_file() else data_dir("build") / f"{name}.cmake", known)


def _read_recipe(name: str, script: Path, known: Mapping[str, Any]) -> Recipe:
    try:
        text = read_bounded(script).decode()
        texts = [*(read_bounded(script.parent / other).decode() for other in includes(text)), text]
    except (OSError, ValueError) as error:
        raise UsageError(f"the recipe {script} cannot be read: {error}") from error
    return make_recipe(name, str(script), texts, known)
