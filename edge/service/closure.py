"""Copy the running edgellm with the distributions it needs: works offline, and installs what was tested.

A checkout is copied in the layout of the wheel.
"""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import edge
from edge.resources import data_dir

ROOT = "edgellm"
DATA = ("build", "profiles", "systemd")
NOT_FOR_A_SERVICE = ("dev",)
_SKIPPED = ("__pycache__", ".pyc")


@dataclass(frozen=True, slots=True)
class Piece:
    """One distribution: `files` maps paths relative to site-packages to their sources, `mark` names the version."""

    mark: str
    files: dict[Path, Path]


def pieces() -> list[Piece]:
    """Return edgellm and its requirements; of its own extras those that are installed, without `dev`."""
    found: dict[str, Distribution] = {}
    waiting: list[tuple[str, frozenset[str] | None]] = [(ROOT, None)]
    while waiting:
        name, extras = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed
        waiting += [needed for text in found[name].requires or () if (needed := _required(text, extras))]
    return [_piece(name, each) for name, each in found.items()]


def _required(text: str, extras: frozenset[str] | None) -> tuple[str, frozenset[str]] | None:
    """Return name and extras of a requirement that applies here, else None. `extras` None: all but `dev`."""
    try:
        needed = Requirement(text)
    except InvalidRequirement:
        return None
    if needed.marker is not None:
        asked = ("", *(_own_extras() if extras is None else extras))
        if not any(needed.marker.evaluate({"extra": extra}) for extra in asked):
            return None
    return canonicalize_name(needed.name), frozenset(needed.extras)


def _own_extras() -> list[str]:
    names = distribution(ROOT).metadata.get_all("Provides-Extra") or []
    return [name for name in names if name not in NOT_FOR_A_SERVICE]


def _piece(name: str, installed: Distribution) -> Piece:
    files = {
        Path(str(file)): Path(str(installed.locate_file(file)))
        for file in installed.files or ()
        if ".." not in Path(str(file)).parts and not Path(str(file)).is_absolute() and not str(file).endswith(".pth")
    }
    if name == ROOT:
        files = {target: source for target, source in files.items() if target.parts[0].endswith(".dist-info")}
        files |= _own_files()
    files = {t: s for t, s in files.items() if s.is_file() and not any(word in str(t) for word in _SKIPPED)}
    mark = f"{name} {installed.version}"
    return Piece(f"{mark} {_digest(files)}" if name == ROOT else mark, files)


def _own_files() -> dict[Path, Path]:
    package = Path(edge.__file__).parent
    trees = {Path("edge"): package, **{Path("edge/_data") / name: data_dir(name) for name in DATA}}
    return {
        target / source.relative_to(tree): source
        for target, tree in trees.items()
        for source in tree.rglob("*")
        if source.is_file() and "_data" not in source.relative_to(tree).parts
    }


def _digest(files: dict[Path, Path]) -> str:
    """Hash names and contents: a changed checkout keeps its version number."""
    digest = sha256()
    for target in sorted(files):
        digest.update(f"{target}\0".encode() + sha256(files[target].read_bytes()).digest())
    return digest.hexdigest()[:16]


def copy_site_packages(what: list[Piece], prefix: Path) -> None:
    """Copy into a venv's site-packages, readable by all users."""
    site = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(prefix), "platbase": str(prefix)}))
    for piece in what:
        for target, source in piece.files.items():
            place = site / target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
            place.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
    info = next(site.glob("edgellm-*.dist-info"), None)
    if info is not None:
        (info / "direct_url.json").unlink(missing_ok=True)  # no longer an editable installation
        (info / "INSTALLER").write_text("edgellm service\n", encoding="utf-8")
