"""Install, select and remove engines by renames; selected.json names the one that serves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge.engine.embedded_engine import find_embedded
from edge.engine.faults import BuildError
from edge.engine.installed import SCHEMA, Selection, ids, is_id, load, manifest, read_selection, write_selection
from edge.engine.proof import Proof
from edge.errors import BadDataError, EdgeError, EngineMissingError, UnavailableError, UsageError
from edge.linux.files import sha256_file, sync_folder, try_lock, write_shared


@contextlib.contextmanager
def locked(engines: Path) -> Iterator[None]:
    """Hold the lock of builds, imports and removals. Raises UnavailableError if another process holds it."""
    engines.mkdir(parents=True, exist_ok=True)
    with (engines / ".lock").open("w") as file:
        if not try_lock(file):
            raise UnavailableError("another build or import is running here", "wait for it to end")
        yield


def new_id(engines: Path, commit: str, recipe: str) -> str:
    """Return `<commit9>-<recipe>-<n>`, n one above the highest installed."""
    stem = f"{commit[:9]}-{re.sub(r'[^A-Za-z0-9_.]+', '-', recipe)}"
    taken = [int(name.rpartition("-")[2]) for name in ids(engines) if re.fullmatch(rf"{re.escape(stem)}-\d+", name)]
    return f"{stem}-{max(taken, default=0) + 1}"


@contextlib.contextmanager
def staging(engines: Path) -> Iterator[Path]:
    """Yield an empty folder on the same disk, removed afterwards unless it was renamed. Remove old leftovers."""
    engines.mkdir(parents=True, exist_ok=True)
    for leftover in engines.glob(".new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = engines / f".new-{os.getpid()}"
    (folder / "bin").mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_programs(build_bin: Path, programs: Sequence[str], folder: Path) -> None:
    """Copy the built programs into the staging folder and sync them. A full disk is named (FC-14)."""
    try:
        for name in programs:
            target = folder / "bin" / name
            shutil.copyfile(build_bin / name, target)
            target.chmod(0o755)
            _sync(target)
    except OSError as error:
        hint = "free some space; the engine in use is untouched"
        raise BuildError(f"the new engine could not be copied: {error.strerror}", hint) from error


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def describe(
    folder: Path, engine_id: str, proof: Proof, made: Mapping[str, Any], previous: str | None
) -> dict[str, Any]:
    """Make engine.json. `made` has source, recipe, options, toolchain, target, fingerprint and the build's notes."""
    files = {
        str(path.relative_to(folder)): {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted((folder / "bin").iterdir())
    }
    target = {**made.get("target", {}), "cuda_arch": list(proof.traits.built_for), "no_vmm": proof.traits.no_vmm}
    target["machine"] = proof.traits.machine or target.get("machine")
    return {
        "schema": SCHEMA,
        "id": engine_id,
        "kind": "llama-server",
        **{key: value for key, value in made.items() if key != "target"},
        "target": target,
        "files": files,
        "flags": {
            name: {"arity": flag.arity, "spelling": flag.spelling, "values": list(flag.values)}
            for name, flag in proof.engine.flags.items()
        },
        "progress_protocol": proof.traits.progress_protocol,
        "library_path": proof.engine.library_path,
        "without": [asdict(off) for off in proof.engine.without],
        "proof": proof_document(proof),
        "previous": previous,
    }


def proof_document(proof: Proof) -> dict[str, Any]:
    return {
        "devices": [asdict(device) for device in proof.engine.devices],
        "smoke_tokens": proof.smoke.tokens,
        "smoke_tokens_s": proof.smoke.tokens_s,
        "smoke_ready_s": proof.smoke.ready_s,
        "offloaded": list(proof.smoke.offloaded) if proof.smoke.offloaded else None,
        "gpu": proof.gpu,
        "notes": list(proof.notes),
        "at": proof.at,
    }


def commit(engines: Path, folder: Path, document: Mapping[str, Any]) -> str:
    """Sync the staging folder, rename it to engines/<id> and select it."""
    engine_id = str(document["id"])
    if not is_id(engine_id):
        raise BadDataError(f"{engine_id!r} is no name for an engine")
    write_shared(folder / "engine.json", json.dumps(document, indent=2) + "\n")
    sync_folder(folder / "bin")
    folder.replace(engines / engine_id)
    sync_folder(engines)
    use(engines, engine_id)
    return engine_id


def use(engines: Path, engine_id: str) -> Selection:
    """Select an installed engine; the one selected before becomes `previous`."""
    load(engines, engine_id)
    before = read_selection(engines)
    if before.current == engine_id:
        return before
    after = Selection(engine_id, before.current)
    write_selection(engines, after)
    return after


def rollback(engines: Path) -> Selection:
    """Swap current and previous. Without a previous engine the embedded one is selected."""
    before = read_selection(engines)
    if before.current is None and before.previous is None:
        raise EngineMissingError("no engine is selected, so there is nothing to roll back", "see `edgellm engine list`")
    if before.previous is not None:
        load(engines, before.previous)
    elif find_embedded(sys.executable) is None:
        raise EngineMissingError("there is no former engine to roll back to", "see `edgellm engine list`")
    after = Selection(before.previous, before.current)
    write_selection(engines, after)
    return after


def remove(engines: Path, engine_id: str, build_root: Path | None = None) -> None:
    """Delete an engine and its build folder. Raises UsageError for the selected one."""
    selected = read_selection(engines)
    if engine_id == selected.current:
        raise UsageError(f"{engine_id} is in use", "select another first: `edgellm engine use ID`, or `rollback`")
    folder = engines / engine_id
    if not is_id(engine_id) or not folder.is_dir():
        raise EngineMissingError(f"no engine {engine_id}", "see `edgellm engine list`")
    with contextlib.suppress(EdgeError):
        fingerprint = manifest(engines, engine_id).get("fingerprint")
        if build_root is not None and isinstance(fingerprint, str) and is_id(fingerprint):
            shutil.rmtree(build_root / fingerprint, ignore_errors=True)
    if engine_id == selected.previous:
        write_selection(engines, Selection(selected.current, None))
    grave = engines / f".new-removed-{os.getpid()}"
    folder.replace(grave)
    shutil.rmtree(grave)
