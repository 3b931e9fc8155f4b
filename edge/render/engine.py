"""Text of `edgellm engine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from edge.engine.installed import Selection
from edge.render.common import console
from edge.units import format_bytes


def show_catalogue(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _json(document)
        return
    table = Table("", "engine", "version", "for", "size", "proof", box=None, pad_edge=False)
    for entry in document["engines"]:
        mark = "*" if entry["id"] == document["current"] else "-" if entry["id"] == document["previous"] else ""
        if "broken" in entry:
            _row(table, mark, entry["id"], "", "", "", f"broken: {entry['broken']}")
            continue
        arch = ", ".join(f"sm_{a}" for a in entry["cuda_arch"]) or "CPU"
        proof = f"{entry['smoke_tokens_s']} tok/s{' on the GPU' if entry['gpu'] else ''}, {entry['proved_at']}"
        _row(table, mark, entry["id"], entry["version"] or "", arch, format_bytes(entry["bytes"]), proof)
    if document["embedded"]:
        mark = "*" if document["current"] == document["embedded"] else ""
        _row(table, mark, document["embedded"], "", "CPU", "", "comes with edgellm[embedded]")
    if not table.row_count:
        print("no engine is built yet: edgellm build")
        return
    console().print(table)
    print("* in use from the next start   - where `edgellm engine rollback` returns to")


def show_engine(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _json(document)
        return
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    keys = "id kind path version commit era fingerprint source recipe toolchain target"
    keys += " cuda built_for no_vmm progress_protocol devices proof files options"
    for key in keys.split():
        if document.get(key) is not None:
            _row(table, key, _plain(document[key]))
    _row(table, "flags", f"{len(document['flags'])} known")
    console().print(table)


def _row(table: Table, *cells: str) -> None:
    """Add a row. Names and paths are no markup, and none of them is cut."""
    table.add_row(*(Text(cell, overflow="fold") for cell in cells))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} = {_short(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "\n".join(_short(item) for item in value) or "none"
    return str(value)


def _short(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)


def show_selection(selection: Selection, as_json: bool) -> None:
    if as_json:
        _json({"schema": 1, "current": selection.current, "previous": selection.previous})
        return
    print(f"in use from the next start: {selection.current or 'the embedded engine'}")
    if selection.previous:
        print(f"`edgellm engine rollback` returns to {selection.previous}")
    print("a running server keeps its engine until `edgellm restart`")


def show_removed(engine_id: str, as_json: bool) -> None:
    if as_json:
        _json({"schema": 1, "removed": engine_id})
    else:
        print(f"{engine_id} is removed")


def show_exported(engine_id: str, file: Path, size_bytes: int, as_json: bool) -> None:
    if as_json:
        _json({"schema": 1, "engine": engine_id, "file": str(file), "bytes": size_bytes})
    else:
        print(f"{file} holds {engine_id} ({format_bytes(size_bytes)})")
        print(f"on the other board: edgellm engine import {file.name}")


def show_imported(engine_id: str, new: bool, as_json: bool) -> None:
    if as_json:
        _json({"schema": 1, "engine": engine_id, "new": new})
    else:
        print(f"{engine_id} is {'proved, installed' if new else 'already installed'} and in use from the next start")


def _json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2))
