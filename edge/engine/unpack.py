"""Verify an archive by hash and unpack it into a tree that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from edge.engine.faults import BuildError
from edge.engine.recipe import dropped
from edge.errors import BadDataError
from edge.linux.files import CHUNK_BYTES, sha256_file


def verify(archive: Path, sha256: str) -> None:
    """Compare an archive's hash. Raises BadDataError for another hash than the pinned one."""
    try:
        actual = sha256_file(archive)
    except OSError as error:
        raise BadDataError(f"{archive} cannot be read: {error.strerror}") from error
    if actual != sha256:
        raise BadDataError(
            f"{archive.name} has the wrong hash: {actual[:16]}… instead of {sha256[:16]}…",
            f"delete {archive} and fetch it again; a file with another hash is never built",
        )


def unpack(archive: Path, pypi: Mapping[str, Any], tree: Path, drop: tuple[str, ...]) -> None:
    """Verify the archive, unpack it beside `tree` and rename it. Links and unsafe names are skipped."""
    verify(archive, str(pypi["sha256"]))
    partial = tree.with_name(f".{tree.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                _write(tar, member, str(pypi["inside"]), partial, drop)
        partial.replace(tree)
    except OSError as error:
        raise BuildError(f"{archive.name} could not be unpacked: {error}", "is the disk full?") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, inside: str, to: Path, drop: tuple[str, ...]) -> None:
    name = PurePosixPath(member.name)
    if not member.isfile() or not name.is_relative_to(inside):
        return
    path = name.relative_to(inside)
    # .git is a file that names a folder outside the tree: ninja would restart without end.
    if ".." in path.parts or path.parts[:1] == (".git",) or dropped(str(path), drop):
        return
    content = tar.extractfile(member)
    if content is None:
        return
    target = to / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(content, file, CHUNK_BYTES)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
    os.utime(target, (member.mtime, member.mtime))
