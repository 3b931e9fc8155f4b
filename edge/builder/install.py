"""Install, select and remove engines by renames; selected.json names the one that serves."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from edge.builder.proof import Proof, prove
from edge.engine.embedded_engine import find_embedded
from edge.engine.inspect import Identity, run_as, unprivileged
from edge.engine.installed import (
    SCHEMA,
    SERVER,
    SelectedEngine,
    find_same,
    ids,
    is_id,
    is_intact,
    load,
    manifest,
    read_selection,
    unknown_engine,
    write_selection,
)
from edge.errors import BadDataError, BuildError, EdgeError, EngineMissingError, UnavailableError, UsageError
from edge.linux.files import parse_json, sha256_file, sync_folder, try_lock, write_shared
from edge.models.disk import need_space


@contextlib.contextmanager
def locked(engines: Path) -> Iterator[None]:
    """Hold the lock of builds, imports and removals. Raises UnavailableError if another process holds it."""
    engines.mkdir(parents=True, exist_ok=True)
    # 0600: another user that may open it could hold its lock.
    descriptor = os.open(engines / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        if not try_lock(file):
            raise UnavailableError("another build or import is running here", "wait for it to end")
        yield


def new_id(engines: Path, commit: str, recipe: str) -> str:
    """Return `<commit9>-<recipe>-<n>`, n one above the highest installed."""
    stem = f"{commit[:9]}-{re.sub(r'[^A-Za-z0-9_.]+', '-', recipe)[:60]}"
    taken = [int(name.rpartition("-")[2]) for name in ids(engines) if re.fullmatch(rf"{re.escape(stem)}-\d+", name)]
    return f"{stem}-{max(taken, default=0) + 1}"


@contextlib.contextmanager
def staging(engines: Path) -> Iterator[Path]:
    """Yield an empty folder on the same disk, removed afterwards unless it was renamed. Remove old leftovers."""
    engines.mkdir(parents=True, exist_ok=True)
    # Under the caller's lock: a leftover belongs to a build that was killed.
    for leftover in engines.glob(".new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = engines / f".new-{os.getpid()}"
    (folder / "bin").mkdir(parents=True)
    for each in (folder, folder / "bin"):
        each.chmod(0o755)  # whatever root's umask: the service's user runs what root builds and imports
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
        "flags": to_builtins(proof.engine.flags),
        "progress_protocol": proof.traits.progress_protocol,
        "rpc": proof.traits.rpc,
        "library_path": proof.engine.library_path,
        "without": to_builtins(proof.engine.without),
        "proof": proof_document(proof),
        "previous": previous,
    }


def proof_document(proof: Proof) -> dict[str, Any]:
    return {
        "devices": to_builtins(proof.engine.devices),
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
    # The manifest last: a folder without one is no engine (see ids), so a power cut leaves nothing half installed.
    write_shared(folder / "engine.json", json.dumps(document, indent=2) + "\n")
    sync_folder(folder / "bin")
    folder.replace(engines / engine_id)
    sync_folder(engines)
    use(engines, engine_id)
    return engine_id


def use(engines: Path, engine_id: str) -> SelectedEngine:
    """Select an installed engine, or `embedded`; the one selected before becomes `previous`."""
    before = read_selection(engines)
    embedded = find_embedded(sys.executable)
    wanted = None if embedded is not None and engine_id in ("embedded", embedded.id) else engine_id
    if wanted is not None:
        load(engines, wanted)
    if wanted == before.current:
        return before
    after = SelectedEngine(wanted, before.current)
    write_selection(engines, after)
    return after


def rollback(engines: Path) -> SelectedEngine:
    """Swap current and previous. Without a previous engine the embedded one is selected."""
    before = read_selection(engines)
    if before.current is None and before.previous is None:
        raise EngineMissingError("no engine is selected, so there is nothing to roll back", "see `edgellm engine list`")
    if before.previous is not None:
        load(engines, before.previous)
    elif find_embedded(sys.executable) is None:
        raise EngineMissingError("there is no former engine to roll back to", "see `edgellm engine list`")
    # Swapped, not popped: a second rollback undoes the first.
    after = SelectedEngine(before.previous, before.current)
    write_selection(engines, after)
    return after


def remove(engines: Path, engine_id: str, build_root: Path | None = None) -> None:
    """Delete an engine and its build folder. Raises UsageError for the selected one."""
    selected = read_selection(engines)
    if engine_id == selected.current:
        raise UsageError(f"{engine_id} is in use", "select another first: `edgellm engine use ID`, or `rollback`")
    folder = engines / engine_id
    if not is_id(engine_id) or not folder.is_dir():
        raise unknown_engine(engine_id)
    with contextlib.suppress(EdgeError):
        fingerprint = manifest(engines, engine_id).get("fingerprint")
        if build_root is not None and isinstance(fingerprint, str) and is_id(fingerprint):
            shutil.rmtree(build_root / fingerprint, ignore_errors=True)
    if engine_id == selected.previous:
        write_selection(engines, SelectedEngine(selected.current, None))
    # Out of sight by one rename, then deleted: an interrupted deletion is swept with the next staging folder.
    grave = engines / f".new-removed-{os.getpid()}"
    folder.replace(grave)
    shutil.rmtree(grave)


# Export an engine as one file and import it on boards without a network or a compiler.

_MANIFEST = "engine.json"
# A manifest of 370 options and four files has 60 kB; a larger one is not ours.
_MAX_MANIFEST_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20
# ELF, or a script with its interpreter: a gigabyte of zeros is not written out first.
_PROGRAMS = (b"\x7fELF", b"#!")


def export_engine(engines: Path, engine_id: str, file: Path) -> int:
    """Write one tar (gzip if the name ends in .gz or .tgz), manifest first. Return its size in bytes."""
    load(engines, engine_id)
    document = manifest(engines, engine_id)
    if not is_intact(engines, engine_id):
        raise BadDataError(f"engine {engine_id} is not what its manifest says", "build or import it again")
    # Beside the target: a rename between file systems would be a copy that can break off. Made anew ("x") under a name
    # that cannot be guessed: in /tmp another user could make it first, and own the archive, or link it to a file.
    partial = file.with_name(f".edgellm-{secrets.token_hex(8)}.partial")
    packed = file.name.endswith((".gz", ".tgz"))
    try:
        with tarfile.open(partial, "x:gz", compresslevel=6) if packed else tarfile.open(partial, "x") as tar:
            body = (json.dumps(document, indent=2) + "\n").encode()
            info = tarfile.TarInfo(_MANIFEST)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
            for name in sorted(document["files"]):
                tar.add(engines / engine_id / name, arcname=name, filter=_anonymous)
        partial.replace(file)
    except OSError as error:
        raise BuildError(f"{file} could not be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return file.stat().st_size


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Drop owner and time, so that the same engine makes the same bytes."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 0
    return info


def import_engine(engines: Path, file: Path, *, root: Path = Path("/")) -> tuple[str, bool]:
    """Check every file against the manifest, prove the engine here, install and select it.

    Return (id, whether it was new). A bad file (BadDataError) or a failed proof (BuildError) changes nothing.
    """
    with locked(engines), staging(engines) as folder:
        document = _unpack(file, folder)
        built, here = document["target"].get("machine"), os.uname().machine
        if built not in (None, here):
            raise BadDataError(f"{file.name} holds an engine for {built}, and this machine is {here}")
        same = find_same(engines, "files", document["files"])
        if same is not None:
            use(engines, same)
            return same, False
        arch = tuple(int(a) for a in document["target"].get("cuda_arch", ()))
        # The archive may come from anywhere: its program does not run as root before an operator starts it.
        who = unprivileged()
        with _reachable(folder, who) as place, run_as(who):
            proof = prove(place / SERVER, cuda=bool(arch), arch=arch, root=root)
        wanted = str(document["id"])
        engine_id = wanted if wanted not in ids(engines) else _next_id(engines, document)
        made = {key: document[key] for key in document if key not in _OURS}
        made["imported"] = {"id": wanted, "proof": document.get("proof")}
        return commit(engines, folder, describe(folder, engine_id, proof, made, read_selection(engines).current)), True


@contextlib.contextmanager
def _reachable(folder: Path, who: Identity | None) -> Iterator[Path]:
    """Yield a copy that another user can execute: ours may lie under a closed home."""
    if who is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="edgellm-import-") as name:
        Path(name).chmod(0o755)
        shutil.copytree(folder / "bin", Path(name) / "bin")
        yield Path(name)


# describe() writes these anew on the importing machine.
_OURS = {
    "schema",
    "id",
    "kind",
    "files",
    "flags",
    "progress_protocol",
    "rpc",
    "library_path",
    "without",
    "proof",
    "previous",
    "imported",
}


def _next_id(engines: Path, document: dict[str, Any]) -> str:
    return new_id(engines, str(document["source"].get("commit") or "unknown"), str(document["recipe"]["name"]))


def _unpack(file: Path, folder: Path) -> dict[str, Any]:
    if file.exists() and not file.is_file():  # a FIFO is waited for without end, a device may have no end
        raise BadDataError(f"{file.name} is not a file", "name an archive of `edgellm engine export`")
    try:
        with tarfile.open(file) as tar:
            first = tar.next()
            if first is None or first.name != _MANIFEST or not first.isfile() or first.size > _MAX_MANIFEST_BYTES:
                raise BadDataError(f"{file.name} is not an exported engine", "make one with `edgellm engine export`")
            document = _manifest(file, tar, first)
            expected = dict(document["files"])
            need_space(folder, sum(int(listed["bytes"]) for listed in expected.values()))
            # One member at a time: name and size are checked before its first byte is written.
            while (member := tar.next()) is not None:
                _extract(file, tar, member, expected, folder)
    except OSError as error:
        if error.errno is None:  # how gzip and lzma report a damaged file
            raise BadDataError(f"{file.name} cannot be read: {error}", "copy it again") from error
        raise BadDataError(f"{file.name} cannot be unpacked: {error.strerror}", "is the disk full?") from error
    except (tarfile.TarError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadDataError(f"{file.name} cannot be read: {error}", "copy it again") from error
    if expected:
        raise BadDataError(f"{file.name} lacks {', '.join(sorted(expected))}", "copy it again")
    return document


def _manifest(file: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    content = tar.extractfile(member)
    document = parse_json(content.read()) if content else None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BadDataError(f"{file.name} has a schema this version does not read", "update edgellm")
    if SERVER not in document["files"] or not isinstance(document["target"], dict):
        raise BadDataError(f"{file.name} holds no {SERVER}")
    if not all(isinstance(arch, int) for arch in document["target"].get("cuda_arch", ())):
        raise BadDataError(f"{file.name} names GPU architectures that are no numbers")
    names = (document["id"], document["recipe"]["name"], document["source"].get("commit") or "unknown")
    if not all(isinstance(name, str) and is_id(name) for name in names):
        raise BadDataError(f"{file.name} names its engine in a way that is no file name")
    return document


def _extract(file: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, expected: dict[str, Any], folder: Path) -> None:
    """Extract and hash one file of bin/. Links, folders, other places and unlisted names are refused."""
    listed = expected.pop(member.name, None)
    parts = member.name.split("/")
    plain = len(parts) == 2 and parts[0] == "bin" and parts[1] not in ("", ".", "..")
    if listed is None or not plain or not member.isfile() or member.size != listed["bytes"]:
        raise BadDataError(
            f"{file.name} holds {member.name[:80]!r}, which its manifest does not list like this", "copy it again"
        )
    content = tar.extractfile(member)
    assert content is not None
    digest = hashlib.sha256()
    target = folder / member.name
    with target.open("wb") as out:
        while chunk := content.read(_CHUNK_BYTES):
            if not out.tell() and not chunk.startswith(_PROGRAMS):
                raise BadDataError(f"{member.name} in {file.name} is no Linux program", "make another archive")
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != listed["sha256"]:
        raise BadDataError(f"{member.name} in {file.name} has the wrong hash", "copy it again")
    target.chmod(0o755)
