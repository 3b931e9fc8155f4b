"""Find a recipe in the user's configuration folder, in a file, or among the shipped ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.engine.recipe import Recipe, includes, make_recipe, recipe_name
from edge.engine.request import Request
from edge.errors import UsageError
from edge.resources import data_dir


def find_recipe(request: Request, table: Mapping[str, Any]) -> Recipe:
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
        text = script.read_text(encoding="utf-8")
        texts = [*((script.parent / other).read_text(encoding="utf-8") for other in includes(text)), text]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the recipe {script} cannot be read: {error}") from error
    return make_recipe(name, str(script), texts, known)
