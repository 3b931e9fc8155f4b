"""Describe the engines of this machine as JSON documents."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge.engine.embedded_engine import find_embedded
from edge.engine.engine import Engine
from edge.engine.inspect import inspect
from edge.engine.installed import SCHEMA, ids, is_id, load, manifest, read_selection
from edge.errors import EdgeError, EngineMissingError
from edge.folders import Folders


def catalogue(engines: Path) -> dict[str, Any]:
    """List every installed engine, broken ones with the reason, and the embedded engine."""
    selected = read_selection(engines)
    embedded = find_embedded(sys.executable)
    return {
        "schema": SCHEMA,
        "current": selected.current or (embedded.id if embedded else None),
        "previous": selected.previous,
        "engines": [_entry(engines, engine_id) for engine_id in ids(engines)],
        "embedded": embedded.id if embedded else None,
    }


def _entry(engines: Path, engine_id: str) -> dict[str, Any]:
    try:
        document = manifest(engines, engine_id)
        engine = load(engines, engine_id)
    except EdgeError as error:
        return {"id": engine_id, "broken": str(error)}
    return {
        "id": engine_id,
        "version": engine.version,
        "commit": engine.commit,
        "recipe": document["recipe"]["name"],
        "cuda_arch": list(engine.built_for),
        "bytes": sum(int(entry["bytes"]) for entry in document["files"].values()),
        "proved_at": document["proof"].get("at"),
        "smoke_tokens_s": document["proof"].get("smoke_tokens_s"),
        "gpu": document["proof"].get("gpu"),
    }


def current_id(engines: Path) -> str:
    """Return the selected engine. Raises EngineMissingError if none is."""
    current = read_selection(engines).current
    if current is None:
        raise EngineMissingError("no engine is selected", "build one: `edgellm build`")
    return current


def about(folders: Folders, wanted: str | None) -> dict[str, Any]:
    """Describe one engine: the manifest of an installed one, else the answers of the binary."""
    engines = folders.engines
    chosen = wanted or current_id(engines)
    if is_id(chosen) and (engines / chosen).is_dir():
        return {**manifest(engines, chosen), "path": load(engines, chosen).path}
    path = Path(chosen).expanduser()
    if os.sep in chosen or path.exists():
        return _engine_document(inspect(path / "llama-server" if path.is_dir() else path, folders.cache / "inspect"))
    raise EngineMissingError(f"no engine {chosen}", "see `edgellm engine list`")


def _engine_document(engine: Engine) -> dict[str, Any]:
    document = asdict(engine)
    document["flags"] = {name: asdict(flag) for name, flag in engine.flags.items()}
    return {"schema": SCHEMA, **document}
