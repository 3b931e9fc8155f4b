"""`edgellm engine`: list, select, roll back, remove and copy engines."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from edge.cli.complete import known_engines
from edge.cli.options import Json, StateDir, confirm_in_use, folders_of, print_json, print_result
from edge.cli.output import console, draw
from edge.engine.installed import SelectedEngine
from edge.units import format_bytes, printable

Id = Annotated[
    str, typer.Argument(metavar="ID", help="as in `edgellm engine list`, or embedded", autocompletion=known_engines)
]


def register(root: typer.Typer) -> None:
    noun = typer.Typer(no_args_is_help=True, help="List, select, roll back and copy engines.")
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
    from edge.engine.installed import catalogue

    show_catalogue(catalogue(_engines(state_dir)), as_json)


def show(
    engine: Annotated[str | None, typer.Argument(metavar="[ID|PATH]", help="an id or a llama-server binary")] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Show one engine."""
    from edge.engine.installed import about

    show_engine(about(folders_of(state_dir), engine), as_json)


def use(engine: Id, as_json: Json = False, state_dir: StateDir = None) -> None:
    """Serve with this engine from the next start."""
    from edge.builder import install

    with install.locked(_engines(state_dir)):
        show_selection(install.use(_engines(state_dir), engine), as_json)


def rollback(as_json: Json = False, state_dir: StateDir = None) -> None:
    """Select the previous engine again."""
    from edge.builder import install

    with install.locked(_engines(state_dir)):
        show_selection(install.rollback(_engines(state_dir)), as_json)


def remove(
    engine: Id,
    force: Annotated[bool, typer.Option("--force", help="also an engine that is running")] = False,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Delete an engine that is not selected for the next start."""
    from edge.builder import install
    from edge.cli.client import running_engine

    folders = folders_of(state_dir)
    # Its next child would be started from the files that are gone.
    confirm_in_use(f"{engine} is run by", None if force else running_engine(folders, engine), "remove")
    with install.locked(folders.engines):
        install.remove(folders.engines, engine, folders.cache / "build")
    print_result(as_json, {"schema": 1, "removed": engine}, [f"{engine} is removed"])


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="archive to write; compressed if its name ends in .gz")],
    engine: Annotated[str | None, typer.Option("--engine", metavar="ID", help="default: the current one")] = None,
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Write an engine to one file for other boards."""
    from edge.builder.install import export_engine
    from edge.engine.installed import current_id

    engines = _engines(state_dir)
    chosen = engine or current_id(engines)
    size_bytes = export_engine(engines, chosen, file)
    lines = [
        f"{file} holds {chosen} ({format_bytes(size_bytes)})",
        f"on the other board: edgellm engine import {shlex.quote(file.name)}",
    ]
    print_result(as_json, {"schema": 1, "engine": chosen, "file": str(file), "bytes": size_bytes}, lines)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="made by `edgellm engine export`")],
    as_json: Json = False,
    state_dir: StateDir = None,
) -> None:
    """Prove and install an exported engine."""
    from edge.builder.install import import_engine

    engine_id, new = import_engine(_engines(state_dir), file)
    line = f"{engine_id} is {'proved, installed' if new else 'already installed'} and in use from the next start"
    print_result(as_json, {"schema": 1, "engine": engine_id, "new": new}, [line])


def _engines(state_dir: Path | None) -> Path:
    return folders_of(state_dir).engines


# Text of `edgellm engine`.


def show_catalogue(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    rows = []
    for entry in document["engines"]:
        mark = "*" if entry["id"] == document["current"] else "-" if entry["id"] == document["previous"] else ""
        if "broken" in entry:
            rows.append((mark, entry["id"], "", "", "", f"broken: {entry['broken']}"))
            continue
        arch = ", ".join(f"sm_{a}" for a in entry["cuda_arch"]) or "CPU"
        speed = "not proved" if entry["smoke_tokens_s"] is None else f"{entry['smoke_tokens_s']} tok/s"
        proof = ", ".join(filter(None, (f"{speed}{' on the GPU' if entry['gpu'] else ''}", entry["proved_at"])))
        proof += f", without {' and '.join(entry['without'])}" if entry["without"] else ""
        rows.append((mark, entry["id"], entry["version"] or "", arch, format_bytes(entry["bytes"]), proof))
    if document["embedded"]:
        mark = "*" if document["current"] == document["embedded"] else ""
        rows.append((mark, document["embedded"], "", "CPU", "", "comes with edgellm[embedded]"))
    if not rows:
        print("no engine is built yet: edgellm build")
        return
    draw(console(), ("", "engine", "version", "for", "size", "proof"), rows, drop=("version", "size", "proof"))
    print("* in use from the next start   - where `edgellm engine rollback` returns to")


def show_engine(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    # The manifest's own names, in the order of a question: which, from where, built how, proved how.
    keys = "id kind path version commit era fingerprint source recipe toolchain target"
    keys += " cuda built_for no_vmm progress_protocol rpc devices proof files options"
    for key in keys.split():
        if document.get(key) is not None:
            _row(table, key, _plain(document[key]))
    for off in document.get("without", ()):
        _row(table, "without", f"{off['id']}, with which it crashed: {off['lost']}")
    _row(table, "flags", f"{len(document['flags'])} known")
    console().print(table)


def _row(table: Table, *cells: str) -> None:
    """Add a row. Names and paths are no markup, and none of them is cut."""
    table.add_row(*(Text(printable(cell, newlines=True), overflow="fold") for cell in cells))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} = {_short(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "\n".join(_short(item) for item in value) or "none"
    return str(value)


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)


def show_selection(selection: SelectedEngine, as_json: bool) -> None:
    lines = [f"in use from the next start: {selection.current or 'the embedded engine'}"]
    lines += [f"`edgellm engine rollback` returns to {selection.previous}"] if selection.previous else []
    lines.append("a running server keeps its engine until `edgellm restart`")
    print_result(as_json, {"schema": 1, "current": selection.current, "previous": selection.previous}, lines)
