"""`edgellm engine`: the engines that are built, and which one serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="print a JSON document")]
StateDir = Annotated[Path | None, typer.Option(metavar="DIR", help="keep everything under DIR")]
Id = Annotated[str, typer.Argument(metavar="ID", help="see `edgellm engine list`")]


def register(root: typer.Typer) -> None:
    noun = typer.Typer(no_args_is_help=True, help="Engines: list, select, go back, copy between boards.")
    noun.command("list", help="All engines; the current one is marked.\n\nExample: edgellm engine list")(list_engines)
    noun.command("show", help="Everything about one engine.\n\nExample: edgellm engine show /opt/llama-server")(show)
    noun.command("use", help="Serve with this engine from the next start.\n\nExample: edgellm engine use ID")(use)
    noun.command("rollback", help="Go back to the former engine.\n\nExample: edgellm engine rollback")(rollback)
    noun.command("remove", help="Delete an engine.\n\nExample: edgellm engine remove ID")(remove)
    noun.command("export", help="One file for other boards.\n\nExample: edgellm engine export orin.tar")(export)
    noun.command("import", help="Prove and install such a file.\n\nExample: edgellm engine import orin.tar")(import_)
    root.add_typer(noun, name="engine")


def list_engines(json: Json = False, state_dir: StateDir = None) -> None:
    from edge.engine.catalogue import catalogue
    from edge.render.engine import show_catalogue

    show_catalogue(catalogue(_engines(state_dir)), json)


def show(
    engine: Annotated[str | None, typer.Argument(metavar="[ID|PATH]", help="an id or a llama-server binary")] = None,
    json: Json = False,
    state_dir: StateDir = None,
) -> None:
    import os

    from edge.engine.catalogue import about
    from edge.folders import folders
    from edge.render.engine import show_engine

    show_engine(about(folders(os.environ, state_dir), engine), json)


def use(engine: Id, json: Json = False, state_dir: StateDir = None) -> None:
    from edge.engine import install
    from edge.render.engine import show_selection

    with install.locked(_engines(state_dir)):
        show_selection(install.use(_engines(state_dir), engine), json)


def rollback(json: Json = False, state_dir: StateDir = None) -> None:
    from edge.engine import install
    from edge.render.engine import show_selection

    with install.locked(_engines(state_dir)):
        show_selection(install.rollback(_engines(state_dir)), json)


def remove(engine: Id, json: Json = False, state_dir: StateDir = None) -> None:
    import os

    from edge.client import serving_engine
    from edge.engine import install
    from edge.errors import UsageError
    from edge.folders import folders
    from edge.render.engine import show_removed

    where = folders(os.environ, state_dir)
    if serving_engine(where) == engine:
        raise UsageError(f"the running edgellm uses {engine}", "start it again with another one, then remove this")
    with install.locked(where.engines):
        install.remove(where.engines, engine, where.cache / "build")
    show_removed(engine, json)


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a name in .gz is compressed")],
    engine: Annotated[str | None, typer.Option("--engine", metavar="ID", help="another than the current one")] = None,
    json: Json = False,
    state_dir: StateDir = None,
) -> None:
    from edge.engine.archive import export_engine
    from edge.engine.catalogue import current_id
    from edge.render.engine import show_exported

    engines = _engines(state_dir)
    chosen = engine or current_id(engines)
    show_exported(chosen, file, export_engine(engines, chosen, file), json)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="made by `edgellm engine export`")],
    json: Json = False,
    state_dir: StateDir = None,
) -> None:
    from edge.engine.archive import import_engine
    from edge.render.engine import show_imported

    engine_id, new = import_engine(_engines(state_dir), file)
    show_imported(engine_id, new, json)


def _engines(state_dir: Path | None) -> Path:
    import os

    from edge.folders import folders

    return folders(os.environ, state_dir).engines
