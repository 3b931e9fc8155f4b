"""Install engine and models into the service's folders: hard link or copy, verified."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

from edge.engine import install
from edge.engine.engine import Engine
from edge.engine.installed import ids, manifest, read_selection
from edge.errors import BadDataError, EdgeError, UsageError
from edge.linux.files import sha256_file
from edge.model import receipt
from edge.model.file import ModelFile
from edge.model.importer import import_model
from edge.model.progress import Report
from edge.model.store import Store
from edge.service.obstacle import writable_by_others
from edge.service.takeover import inside
from edge.service.unitfile import HOMES, TEMPORARY, within


def has_engine(engine_id: str, source: Path, target: Path) -> bool:
    """Return whether the target selects this engine with the same files."""
    if read_selection(target).current != engine_id or engine_id not in ids(target):
        return False
    return source == target or manifest(source, engine_id).get("files") == manifest(target, engine_id).get("files")


def install_engine(engine_id: str, source: Path, target: Path) -> None:
    """Copy an engine, check each file and select it. Never a link: its former owner could write to it."""
    document = manifest(source, engine_id)
    with install.locked(target), install.staging(target) as folder:
        for name, listed in document["files"].items():
            _copy(source / engine_id / name, folder, name, str(listed["sha256"]))
        same = engine_id in ids(target) and manifest(target, engine_id).get("files") == document["files"]
        if same:
            install.use(target, engine_id)
            return
        if engine_id in ids(target):
            commit, recipe = str(document["source"].get("commit") or "unknown"), str(document["recipe"]["name"])
            document = {**document, "id": install.new_id(target, commit, recipe)}
        install.commit(target, folder, document)


def _copy(source: Path, folder: Path, name: str, sha256: str) -> None:
    parts = Path(name).parts
    if len(parts) != 2 or parts[0] != "bin" or parts[1] == "..":
        raise BadDataError(f"the engine's manifest lists {name!r}", "build it again")
    digest = hashlib.sha256()
    with source.open("rb") as reader, (folder / name).open("wb") as writer:
        while chunk := reader.read(1 << 20):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    if digest.hexdigest() != sha256:
        raise BadDataError(f"{source} is not what its manifest says", "build the engine again, or import it again")
    shutil.copymode(source, folder / name)


def check_engine_path(engine: Engine) -> None:
    """Raise UsageError for an engine path that the service cannot see or that other users can change."""
    path = Path(engine.path)
    hint = "`edgellm engine import`, or copy it below /opt as root"
    if within(str(path), (*HOMES, *TEMPORARY)):
        raise UsageError(f"the service cannot see {path} (ProtectHome, PrivateTmp)", hint)
    writable = writable_by_others(path)
    if writable is not None:
        raise UsageError(f"users other than root can change {writable}, so a service does not run {path}", hint)


def has_model(file: ModelFile, models: Path) -> bool:
    """Return whether the service's store has this file: the same inode, or the same bytes by hash."""
    if inside(file.path, models):
        return True
    try:
        stored = Store(models).resolve(f"{file.name}:{file.quant}")
    except EdgeError:
        return False
    return stored.bytes == file.bytes and (
        Path(stored.path).samefile(file.path) or _sha256(Path(stored.path)) == _sha256(Path(file.path))
    )


def install_model(file: ModelFile, models: Path, owners: frozenset[int], progress: Report | None = None) -> None:
    """Link files of these owners, copy all others. The caller of sudo owns the machine anyway, as root does."""

    def link(path: Path) -> bool:
        state = path.stat()
        plain = stat.S_ISREG(state.st_mode) and state.st_mode & stat.S_IROTH and not state.st_mode & stat.S_IWOTH
        return bool(plain and state.st_uid in owners)

    import_model(Path(file.path), models, name=file.name, progress=progress, link=link)


def _sha256(path: Path) -> str:
    known = receipt.read(path.parent)
    return (known.sha256_of(path.name) if known else None) or sha256_file(path)
