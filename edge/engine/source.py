"""Locate and fetch the source tree, verified against its pin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from edge.engine.download import Say, clone, download, head
from edge.engine.pin import Pin, SourceChoice
from edge.engine.unpack import unpack
from edge.errors import BadDataError


@dataclass(frozen=True, slots=True)
class Source:
    """A llama.cpp tree on disk. `sha256`: the archive's, if any; `pinned`: the hash is that of a pin."""

    type: str
    tree: Path
    name: str
    version: str | None
    commit: str
    build_number: int
    sha256: str | None = None
    pinned: bool = True


def locate(choice: SourceChoice, pin: Pin, src_dir: Path) -> Source:
    """Return where the tree is or will be, without fetching it."""
    if choice.type == "path":
        return _path_source(Path(choice.ref or "."), pin, src_dir)
    if choice.type == "pypi" or (choice.ref is None or choice.ref == pin.commit):
        # One commit is one tree, whichever way it came.
        name = pin.pypi["name"] if choice.type == "pypi" else pin.git["url"]
        sha256 = pin.pypi["sha256"] if choice.type == "pypi" else None
        tree = src_dir / pin.commit9
        return Source(choice.type, tree, name, pin.version, pin.commit, pin.build_number, sha256)
    tree = src_dir / f"git-{hashlib.sha256(choice.ref.encode()).hexdigest()[:12]}"
    commit = head(tree) or "unknown"
    return Source("git", tree, pin.git["url"], choice.ref, commit, 0, pinned=False)


def fetch(choice: SourceChoice, pin: Pin, src_dir: Path, drop: tuple[str, ...], say: Say) -> Source:
    """Fetch the tree if it is absent. Raises BadDataError for a wrong hash, UnavailableError if fetching fails."""
    source = locate(choice, pin, src_dir)
    if (source.tree / "CMakeLists.txt").is_file():
        return source
    if choice.type == "path":
        archive = Path(choice.ref or ".").resolve()
        say(f"checking and unpacking {archive.name}")
        unpack(archive, pin.pypi, source.tree, drop)
    elif choice.type == "pypi":
        archive = download(pin.pypi, src_dir, say)
        say(f"checking and unpacking {archive.name}")
        unpack(archive, pin.pypi, source.tree, drop)
    else:
        clone(pin.git["url"], choice.ref or pin.commit, source.tree, say)
    return locate(choice, pin, src_dir)


def _path_source(path: Path, pin: Pin, src_dir: Path) -> Source:
    """Return the source at a path: a tree, a llama-cpp-python checkout, or the pinned sdist."""
    # Resolved: through a symlink, a .git file's relative path points nowhere and ninja restarts without end.
    path = path.expanduser().resolve()
    if path.is_file():
        return Source(
            "path", src_dir / pin.commit9, path.name, pin.version, pin.commit, pin.build_number, pin.pypi["sha256"]
        )
    tree = path if (path / "tools/server").is_dir() else path / "vendor/llama.cpp"
    if not (tree / "CMakeLists.txt").is_file() or not (tree / "tools/server").is_dir():
        raise BadDataError(f"{path} is no llama.cpp tree", "give the folder that holds CMakeLists.txt and tools/server")
    pointer = tree / ".git"
    if pointer.is_file() and not (tree / pointer.read_text().removeprefix("gitdir: ").strip()).is_dir():
        raise BadDataError(f"{pointer} points to a folder that does not exist", f"delete it: rm {pointer}")
    return Source("path", tree, str(tree), None, head(tree) or "unknown", 0, pinned=False)
