"""Export an engine as one file and import it on boards without a network or a compiler."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

from edge.engine.faults import BuildError
from edge.engine.install import commit, describe, locked, new_id, staging, use
from edge.engine.installed import SCHEMA, SERVER, ids, is_id, load, manifest, read_selection
from edge.engine.proof import prove
from edge.errors import BadDataError, EdgeError

_MANIFEST = "engine.json"
# A manifest of 370 options and four files has 60 kB; a larger one is not ours.
_MAX_MANIFEST_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20


def export_engine(engines: Path, engine_id: str, file: Path) -> int:
    """Write one tar (gzip if the name ends in .gz or .tgz), manifest first. Return its size in bytes."""
    load(engines, engine_id)
    document = manifest(engines, engine_id)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    packed = file.name.endswith((".gz", ".tgz"))
    try:
        with (
            tarfile.open(partial, "w:gz" if packed else "w", compresslevel=6)
            if packed
            else tarfile.open(partial, "w") as tar
        ):
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


def import_engine(engines: Path, file: Path, *, machine: str | None = None, root: Path = Path("/")) -> tuple[str, bool]:
    """Check every file against the manifest, prove the engine here, install and select it.

    Return (id, whether it was new). A bad file (BadDataError) or a failed proof (BuildError) changes nothing.
    """
    with locked(engines), staging(engines) as folder:
        document = _unpack(file, folder)
        here = machine or os.uname().machine
        if document["target"].get("machine") not in (None, here):
            built = document["target"]["machine"]
            raise BadDataError(f"{file.name} holds an engine for {built}, and this machine is {here}")
        same = _same(engines, document)
        if same is not None:
            use(engines, same)
            return same, False
        arch = tuple(int(a) for a in document["target"].get("cuda_arch", ()))
        proof = prove(folder / SERVER, cuda=bool(arch), arch=arch, root=root)
        wanted = str(document["id"])
        engine_id = wanted if wanted not in ids(engines) else _next_id(engines, document)
        made = {key: document[key] for key in document if key not in _OURS}
        made["imported"] = {"id": wanted, "proof": document.get("proof")}
        return commit(engines, folder, describe(folder, engine_id, proof, made, read_selection(engines).current)), True


# describe() writes these anew on the importing machine.
_OURS = {
    "schema",
    "id",
    "kind",
    "files",
    "flags",
    "progress_protocol",
    "library_path",
    "without",
    "proof",
    "previous",
    "imported",
}


def _next_id(engines: Path, document: dict[str, Any]) -> str:
    return new_id(engines, str(document["source"].get("commit") or "unknown"), str(document["recipe"]["name"]))


def _same(engines: Path, document: dict[str, Any]) -> str | None:
    """Return an installed engine with the same files."""
    for engine_id in ids(engines):
        with contextlib.suppress(EdgeError):  # a broken neighbour is not the same engine
            if manifest(engines, engine_id).get("files") == document["files"]:
                load(engines, engine_id)
                return engine_id
    return None


def _unpack(file: Path, folder: Path) -> dict[str, Any]:
    try:
        with tarfile.open(file) as tar:
            first = tar.next()
            if first is None or first.name != _MANIFEST or not first.isfile() or first.size > _MAX_MANIFEST_BYTES:
                raise BadDataError(f"{file.name} is not an exported engine", "make one with `edgellm engine export`")
            document = _manifest(file, tar, first)
            expected = dict(document["files"])
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
    document = json.loads(content.read()) if content else None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BadDataError(f"{file.name} has a schema this version does not read", "update edgellm")
    if SERVER not in document["files"] or not isinstance(document["target"], dict):
        raise BadDataError(f"{file.name} holds no {SERVER}")
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
            f"{file.name} holds {member.name!r}, which its manifest does not list like this", "copy it again"
        )
    content = tar.extractfile(member)
    assert content is not None
    digest = hashlib.sha256()
    target = folder / member.name
    with target.open("wb") as out:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != listed["sha256"]:
        raise BadDataError(f"{member.name} in {file.name} has the wrong hash", "copy it again")
    target.chmod(0o755)
