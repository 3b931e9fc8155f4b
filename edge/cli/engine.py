"""`edgellm engine`: list, select, roll back, remove and copy engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json, StateDir, folders_of
from edge.errors import UsageError

Id = Annotated[str, typer.Argument(metavar="ID", help="as in `edgellm engine list`")]


def register(root: typer.Typer) -> None:
    noun = typer.Typer(no_args_is_help=True, help="Engines: list, select, roll back, copy between boards.")
    noun.command("list", epilog="Example: edgellm engine list")(list_engines)
    noun.command(epilog="Example: edgellm engine show /opt/llama.cpp/llama-server")(show)
    noun.command(epilog="Example: edgellm engine use ID")(use)
    noun.command(epilog="Example: edgellm engine rollback")(rollback)
    noun.command(epilog="Example: edgellm engine remove ID")(remove)
    noun.command(epilog="Example: edgellm engine export orin.tar")(export)
    noun.command("import", epilog="Example: edgellm engine import orin.tar")(import_)
    root.add_typer(noun, name="engine")


def list_engines(as_json: Json = False, state_dir: StateDir = None) -> None:
    """List all engines; the current one is marked."""
    from edge.engine.catalogue import catalogue
    from edge.render.engine import show_catalogue

    show_catalogue(catalogue(_engines(state_dir)), as_json)


def show(
    engine: Annotated[str | None, typer.Argument(metavar="[ID|PATH]", help="an id or a llama-server binary")] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Show one engine."""
    from edge.engine.catalogue import about
    from edge.render.engine import show_engine

    show_engine(about(folders_of(state_dir), engine), as_json)


def use(engine: Id, as_json: Json = False, state_dir: StateDir = None) -> None:
    """Serve with this engine from the next start."""
    from edge.engine import install
    from edge.render.engine import show_selection

    with install.locked(_engines(state_dir)):
        show_selection(install.use(_engines(state_dir), engine), as_json)


def rollback(as_json: Json = False, state_dir: StateDir = None) -> None:
    """Select the previous engine again."""
    from edge.engine import install
    from edge.render.engine import show_selection

    with install.locked(_engines(state_dir)):
        show_selection(install.rollback(_engines(state_dir)), as_json)


def remove(engine: Id, as_json: Json = False, state_dir: StateDir = None) -> None:
    """Delete an engine."""
    from edge.client import serving_engine
    from edge.engine import install
    from edge.render.engine import show_removed

    folders = folders_of(state_dir)
    if serving_engine(folders) == engine:
        raise UsageError(f"the running edgellm uses {engine}", "restart it with another engine, then remove this one")
    with install.locked(folders.engines):
        install.remove(folders.engines, engine, folders.cache / "build")
    show_removed(engine, as_json)


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a name that ends in .gz is compressed")],
    engine: Annotated[str | None, typer.Option("--engine", metavar="ID", help="instead of the current one")] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Write an engine to one file for other boards."""
    from edge.engine.archive import export_engine
    from edge.engine.catalogue import current_id
    from edge.render.engine import show_exported

    engines = _engines(state_dir)
    chosen = engine or current_id(engines)
    show_exported(chosen, file, export_engine(engines, chosen, file), as_json)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="made by `edgellm engine export`")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Prove and install an exported engine."""
    from edge.engine.archive import import_engine
    from edge.render.engine import show_imported

    engine_id, new = import_engine(_engines(state_dir), file)
    show_imported(engine_id, new, as_json)


def _engines(state_dir: Path | None) -> Path:
    return folders_of(state_dir).engines
