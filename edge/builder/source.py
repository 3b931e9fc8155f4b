"""Locate and fetch the source tree, verified against its pin."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tarfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from edge.builder.download import Say, clone, download, head
from edge.builder.recipe import dropped
from edge.builder.toolchain import numbers
from edge.errors import BadDataError, BuildError, UsageError
from edge.linux.files import CHUNK_BYTES, read_bounded, read_json, sha256_file, write_json

# Read the pins of llama.cpp in build/llama.cpp.toml. Pure.

_POINTER_BYTES = 64 << 10  # a path of the kernel has at most 4096 bytes (PATH_MAX)


class Pin(Struct, frozen=True):
    """A llama.cpp release that is trusted by hash. `pypi` and `git` are its two sources."""

    id: str
    commit: str
    version: str
    build_number: int
    released_s: float  # epoch seconds; a clock before it is wrong
    cuda_min: tuple[int, ...]
    cuda_proven: tuple[int, ...]
    cmake_min: tuple[int, ...]
    gcc_min: int
    pypi: Mapping[str, Any]
    git: Mapping[str, Any]

    @property
    def commit9(self) -> str:
        return self.commit[:9]


def pins(table: Mapping[str, Any]) -> tuple[Pin, ...]:
    """Return all pins, newest first."""
    return tuple(
        Pin(
            id=entry["id"],
            commit=entry["commit"],
            version=entry["version"],
            build_number=entry["build_number"],
            released_s=datetime.fromisoformat(entry["released"]).replace(tzinfo=timezone.utc).timestamp(),
            cuda_min=numbers(entry["cuda_min"]),
            cuda_proven=numbers(entry["cuda_proven"]),
            cmake_min=numbers(entry["cmake_min"]),
            gcc_min=entry["gcc_min"],
            pypi=entry["pypi"],
            git=entry["git"],
        )
        for entry in table["pins"]
    )


def pin_for(table: Mapping[str, Any], cuda: tuple[int, ...] | None) -> Pin:
    """Return the newest pin that this CUDA can build, else the newest; None is a CPU build."""
    known = pins(table)
    return next((pin for pin in known if cuda is None or pin.cuda_min <= cuda), known[0])


class SourceChoice(Struct, frozen=True):
    """The option --source: `pypi`, `git`, `git:TAG` or `path:DIR`."""

    type: str  # "pypi" | "git" | "path"
    ref: str | None = None


def parse_source(text: str) -> SourceChoice:
    """Parse --source. Raises UsageError."""
    kind, colon, rest = text.partition(":")
    if kind == "pypi" and not colon:
        return SourceChoice("pypi")
    if kind == "git" and (not colon or rest):
        return SourceChoice("git", rest or None)
    if kind == "path" and rest:
        return SourceChoice("path", rest)
    raise UsageError(f"--source {text}: not a source", "write pypi, git, git:TAG or path:DIR")


# Verify an archive by hash and unpack it into a tree that appears whole or not at all.


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
        # The tree appears whole or not at all: a half unpacked one would compile for minutes and then fail.
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
    # The archive's own times: ninja rebuilds what is newer than its object, so unpacking again rebuilds nothing.
    os.utime(target, (member.mtime, member.mtime))


class SourceArchive(Struct, frozen=True):
    """A llama.cpp tree on disk. `sha256`: the archive's, if any; `pinned`: the hash is that of a pin."""

    type: str
    tree: Path
    name: str
    version: str | None
    commit: str
    build_number: int
    sha256: str | None = None
    pinned: bool = True

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("type", "name", "version", "commit", "sha256", "pinned")}


def locate(choice: SourceChoice, pin: Pin, src_dir: Path) -> SourceArchive:
    """Return where the tree is or will be, without fetching it."""
    if choice.type == "path":
        return _path_source(Path(choice.ref or "."), pin, src_dir)
    if choice.type == "pypi" or (choice.ref is None or choice.ref == pin.commit):
        # One commit is one tree, whichever way it came.
        name = pin.pypi["name"] if choice.type == "pypi" else pin.git["url"]
        sha256 = pin.pypi["sha256"] if choice.type == "pypi" else None
        tree = src_dir / pin.commit9
        return SourceArchive(choice.type, tree, name, pin.version, pin.commit, pin.build_number, sha256)
    tree = src_dir / f"git-{hashlib.sha256(choice.ref.encode()).hexdigest()[:12]}"
    commit = head(tree) or "unknown"
    return SourceArchive("git", tree, pin.git["url"], choice.ref, commit, 0, pinned=False)


def fetch(choice: SourceChoice, pin: Pin, src_dir: Path, drop: tuple[str, ...], say: Say) -> SourceArchive:
    """Fetch the tree if it is absent. Raises BadDataError for a wrong hash, UnavailableError if fetching fails."""
    source = locate(choice, pin, src_dir)
    if (source.tree / "CMakeLists.txt").is_file():
        if source.tree.parent != src_dir or unchanged(source.tree):
            return source
        say(f"{source.tree} is not the tree that was unpacked there: taking it anew")
        shutil.rmtree(source.tree)
    if choice.type == "git":
        clone(pin.git["url"], choice.ref or pin.commit, source.tree, say)
    else:
        archive = Path(choice.ref or ".").resolve() if choice.type == "path" else download(pin.pypi, src_dir, say)
        say(f"checking and unpacking {archive.name}")
        unpack(archive, pin.pypi, source.tree, drop)
    remember(source.tree)
    return locate(choice, pin, src_dir)


def remember(tree: Path) -> None:
    """Write down what lies in a tree that was just verified: `unchanged` compares with it before each build."""
    write_json(_manifest_path(tree), _hashes(tree))


def unchanged(tree: Path) -> bool:
    """Return whether a tree still has the files, with the content, that it had when it was unpacked.

    A build runs what lies in the tree; an edit, a bad disk or a planted file would be compiled as the pinned source.
    """
    try:
        return bool(read_json(_manifest_path(tree)) == _hashes(tree))
    except (OSError, ValueError):
        return False


def _manifest_path(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}.manifest.json")


def _hashes(tree: Path) -> dict[str, str]:
    """Return SHA-256 by path of every file outside .git; a link is its target."""
    found = {}
    for folder, names, files in os.walk(tree):
        # git writes to it at each command (index, logs), and no build reads it.
        if Path(folder) == tree and ".git" in names:
            names.remove(".git")
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        for path in (Path(folder) / name for name in (*files, *links)):
            inside = str(path.relative_to(tree))
            found[inside] = f"-> {path.readlink()}" if path.is_symlink() else sha256_file(path)
    return found


def _path_source(path: Path, pin: Pin, src_dir: Path) -> SourceArchive:
    """Return the source at a path: a tree, a llama-cpp-python checkout, or the pinned sdist."""
    # Resolved: through a symlink, a .git file's relative path points nowhere and ninja restarts without end.
    path = path.expanduser().resolve()
    if path.is_file():
        return SourceArchive(
            "path", src_dir / pin.commit9, path.name, pin.version, pin.commit, pin.build_number, pin.pypi["sha256"]
        )
    tree = path if (path / "tools/server").is_dir() else path / "vendor/llama.cpp"
    if not (tree / "CMakeLists.txt").is_file() or not (tree / "tools/server").is_dir():
        raise BadDataError(f"{path} is no llama.cpp tree", "give the folder that holds CMakeLists.txt and tools/server")
    pointer = tree / ".git"
    if pointer.is_file() and not _points_to_folder(pointer):
        raise BadDataError(
            f"{pointer} points to a folder that does not exist", f"delete it: rm {shlex.quote(str(pointer))}"
        )
    return SourceArchive("path", tree, str(tree), None, head(tree) or "unknown", 0, pinned=False)


def _points_to_folder(pointer: Path) -> bool:
    """Return whether the `.git` of a worktree names a folder. Read as git does: any bytes, and a NUL ends the name."""
    try:
        text = read_bounded(pointer, _POINTER_BYTES)
        named = os.fsdecode(text.partition(b"\0")[0]).removeprefix("gitdir: ").strip()
        return (pointer.parent / named).is_dir()
    except (OSError, ValueError):  # far longer than any path
        return False
