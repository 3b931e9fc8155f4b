"""What runs now, as files to copy: edgellm and the installed distributions it needs. Works offline, and is what was
tested. A checkout is taken as the wheel would lay it out.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import edge
from edge.resources import data_dir

ROOT = "edgellm"
DATA = ("build", "profiles", "systemd")
NOT_FOR_A_SERVICE = ("dev",)
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^]]*\])?")
_SKIPPED = ("__pycache__", ".pyc")


@dataclass(frozen=True, slots=True)
class Piece:
    """`files`: where each one goes, relative to site-packages, and where it is."""

    mark: str
    files: dict[Path, Path]


def pieces() -> list[Piece]:
    """edgellm first, then what it needs; its own extras where they are installed (the development tools are not)."""
    found: dict[str, Distribution] = {}
    waiting: list[tuple[str, frozenset[str] | None]] = [(ROOT, None)]
    while waiting:
        name, extras = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed, or a marker of another platform
        waiting += [needed for text in found[name].requires or () if (needed := _required(text, extras))]
    return [_piece(name, each) for name, each in found.items()]


def _required(text: str, extras: frozenset[str] | None) -> tuple[str, frozenset[str]] | None:
    """`aiohttp[speedups]>=3 ; extra == 'web'` → its name and extras, if one of `extras` asks for it (None: any)."""
    head, _, marker = text.partition(";")
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    if extra and (extra[1] in NOT_FOR_A_SERVICE if extras is None else extra[1] not in extras):
        return None
    match = _NAME.match(head)
    if match is None:
        return None
    return re.sub(r"[-_.]+", "-", match[1]).lower(), frozenset(re.findall(r"[\w.-]+", match[2] or ""))


def _piece(name: str, installed: Distribution) -> Piece:
    files = {
        Path(str(file)): Path(str(installed.locate_file(file)))
        for file in installed.files or ()
        if ".." not in Path(str(file)).parts and not Path(str(file)).is_absolute() and not str(file).endswith(".pth")
    }
    if name == ROOT:
        files = {target: source for target, source in files.items() if target.parts[0].endswith(".dist-info")}
        files |= _ours()
    files = {t: s for t, s in files.items() if s.is_file() and not any(word in str(t) for word in _SKIPPED)}
    mark = f"{name} {installed.version}"
    return Piece(f"{mark} {_digest(files)}" if name == ROOT else mark, files)


def _ours() -> dict[Path, Path]:
    package = Path(edge.__file__).parent
    trees = {Path("edge"): package, **{Path("edge/_data") / name: data_dir(name) for name in DATA}}
    return {
        target / source.relative_to(tree): source
        for target, tree in trees.items()
        for source in tree.rglob("*")
        if source.is_file() and "_data" not in source.relative_to(tree).parts
    }


def _digest(files: dict[Path, Path]) -> str:
    """Changes when a checkout does: the version alone would not say so."""
    digest = sha256()
    for target in sorted(files):
        digest.update(f"{target}\0".encode() + sha256(files[target].read_bytes()).digest())
    return digest.hexdigest()[:16]


def put(what: list[Piece], prefix: Path) -> None:
    """Copies into a venv's site-packages, owned by whoever copies, readable by all."""
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
