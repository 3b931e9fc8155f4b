"""Read installed engines: engines/<id>/{bin/,engine.json} and engines/selected.json."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import MsgspecError, Struct, convert, to_builtins

from edge.engine.embedded_engine import find_embedded
from edge.engine.engine import Acceleration, Device, Engine, Flag, era_of
from edge.engine.inspect import inspect
from edge.errors import EdgeError, EngineBrokenError, EngineMissingError
from edge.linux.files import read_json, sha256_file, write_shared
from edge.paths import Folders
from edge.resources import data_dir, load_toml

SCHEMA = 1
SERVER = "bin/llama-server"


class SelectedEngine(Struct, frozen=True):
    """The selected engine and the one before it. Ids, or None."""

    current: str | None = None
    previous: str | None = None


def read_selection(engines: Path) -> SelectedEngine:
    """Read selected.json; an absent or unreadable file selects nothing."""
    try:
        kept = read_json(engines / "selected.json")
        return SelectedEngine(_id(kept.get("current")), _id(kept.get("previous")))
    except (OSError, ValueError, AttributeError):
        return SelectedEngine()


def write_selection(engines: Path, selection: SelectedEngine) -> None:
    """Replace selected.json. A running server keeps the engine it was started with."""
    document = {"schema": SCHEMA, "current": selection.current, "previous": selection.previous}
    write_shared(engines / "selected.json", json.dumps(document, indent=2) + "\n")


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and is_id(value) else None


# The id is a folder's name, an argument of `edgellm engine use` and part of log lines.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")


def is_id(text: str) -> bool:
    """Return whether `text` may name an engine: a plain folder name, no option, not one of our own files."""
    return _ID.fullmatch(text) is not None and not text.endswith(".json")


def unknown_engine(engine_id: str) -> EngineMissingError:
    """Return the error for a name that no folder of the store has; the embedded engine has none."""
    if engine_id == "embedded" or engine_id.startswith("embedded-"):
        return EngineMissingError(
            "the embedded engine is the Python package xllamacpp, no folder of the store",
            "in edgellm's environment `pip show xllamacpp` describes it, `pip uninstall xllamacpp` removes it",
        )
    return EngineMissingError(f"no engine {engine_id}", "see `edgellm engine list`")


def manifest(engines: Path, engine_id: str) -> dict[str, Any]:
    """Read engine.json. Raises EngineMissingError when there is none, EngineBrokenError when it cannot be read."""
    path = engines / engine_id / "engine.json"
    try:
        document = read_json(path)
    except FileNotFoundError as error:
        raise unknown_engine(engine_id) from error
    except (OSError, ValueError) as error:
        raise EngineBrokenError(f"{path} cannot be read: {error}", "build the engine again") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise EngineBrokenError(f"{path} has a schema this version does not read", "update edgellm")
    return document


def ids(engines: Path) -> list[str]:
    """Return the installed engines, oldest first. One whose folder is closed or whose disk fails is one of them."""
    if not engines.is_dir():
        return []
    found = [(_installed_s(entry), entry.name) for entry in engines.iterdir() if is_id(entry.name)]
    return [name for when_s, name in sorted((when_s, name) for when_s, name in found if when_s is not None)]


def _installed_s(folder: Path) -> float | None:
    """Return when an engine was installed, 0 where that cannot be read; None for what is no engine."""
    try:
        # Of engine.json, which is written last: a folder's own mtime changes with every file in it.
        state = (folder / "engine.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0.0
    return state.st_mtime if stat.S_ISREG(state.st_mode) else None


def find_same(engines: Path, key: str, value: object) -> str | None:
    """Return the newest engine that has this value in its manifest, and its files."""
    for engine_id in reversed(ids(engines)):
        with suppress(EdgeError):  # a broken neighbour is not the same engine
            if manifest(engines, engine_id).get(key) == value and is_intact(engines, engine_id):
                load(engines, engine_id)
                return engine_id
    return None


def is_intact(engines: Path, engine_id: str) -> bool:
    """Return whether each file has the hash that its manifest lists. All are read: a start does not ask this."""
    try:
        files = manifest(engines, engine_id)["files"]
        found = {name: engines / engine_id / name for name in files}
        # The size first: a device has no end.
        return all(
            path.is_file() and path.stat().st_size == files[name]["bytes"] for name, path in found.items()
        ) and all(sha256_file(path) == files[name]["sha256"] for name, path in found.items())
    except (EdgeError, OSError, KeyError, TypeError, AttributeError):
        return False


def load(engines: Path, engine_id: str) -> Engine:
    """Load an installed engine from its manifest; nothing is run. The server's file must have its recorded size."""
    document = manifest(engines, engine_id)
    binary = engines / engine_id / SERVER
    try:
        expected = document["files"][SERVER]["bytes"]
        actual = binary.stat().st_size
    except (KeyError, TypeError, OSError) as error:
        raise EngineBrokenError(f"engine {engine_id} is incomplete: {error}", "build or import it again") from error
    # Size alone: hashing 70 MB would delay each start; `build`, `engine import` and the service compare hashes.
    if actual != expected:
        raise EngineBrokenError(f"{binary} has {actual} bytes instead of {expected}", "build or import it again")
    try:
        return _engine(binary, engine_id, document)
    except (KeyError, TypeError, ValueError, AttributeError, MsgspecError) as error:
        raise EngineBrokenError(
            f"the manifest of engine {engine_id} is not whole: {error!r}", "build it again"
        ) from error


def _engine(binary: Path, engine_id: str, document: dict[str, Any]) -> Engine:
    flags = convert(document["flags"], dict[str, Flag])
    target = document["target"]
    built_for = tuple(int(arch) for arch in target.get("cuda_arch", ()))
    return Engine(
        id=engine_id,
        kind=document["kind"],
        path=str(binary),
        version=document["source"].get("version"),
        commit=document["source"].get("commit"),
        era=era_of(flags, load_toml(data_dir("build") / "llama-server.toml")["eras"]),
        flags=flags,
        devices=convert(document["proof"]["devices"], tuple[Device, ...]),
        cuda=bool(built_for),
        built_for=built_for,
        no_vmm=target.get("no_vmm"),
        progress_protocol=bool(document.get("progress_protocol", True)),
        library_path=document.get("library_path"),
        rpc=bool(document.get("rpc", False)),
        without=convert(document.get("without", ()), tuple[Acceleration, ...]),
    )


# Describe the engines of this machine as JSON documents.


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
        return _described(manifest(engines, engine_id), load(engines, engine_id))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return {"id": engine_id, "broken": f"the manifest of engine {engine_id} is not whole: {error!r}"}
    except EdgeError as error:
        return {"id": engine_id, "broken": str(error)}


def _described(document: dict[str, Any], engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.id,
        "version": engine.version,
        "commit": engine.commit,
        "recipe": (document.get("recipe") or {}).get("name"),
        "cuda_arch": list(engine.built_for),
        "bytes": sum(int(entry["bytes"]) for entry in document["files"].values()),
        "proved_at": document["proof"].get("at"),
        "smoke_tokens_s": document["proof"].get("smoke_tokens_s"),
        "gpu": document["proof"].get("gpu"),
        "without": [off.id for off in engine.without],
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
        engine = inspect(path / "llama-server" if path.is_dir() else path, folders.cache / "inspect")
        return {"schema": SCHEMA, **to_builtins(engine)}
    raise unknown_engine(chosen)
