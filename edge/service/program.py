"""Choose the Python of the service: the running one if only root can change it, else a copy in /opt/edgellm."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import sysconfig
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from msgspec import Struct
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import edge
from edge import __version__
from edge.engine.embedded_engine import find_embedded
from edge.errors import EdgeError, EngineMissingError, UnavailableError
from edge.linux.files import read_json, writable_by_others
from edge.linux.systemctl import run
from edge.resources import data_dir
from edge.service.units import HOMES, PREFIX, PYTHON, TEMPORARY, within

# Copy the running edgellm with the distributions it needs: works offline, and installs what was tested.

ROOT = "edgellm"
DATA = ("build", "profiles", "systemd")  # as the wheel maps them, see pyproject.toml
NOT_FOR_A_SERVICE = ("dev",)
_SKIPPED = ("__pycache__", ".pyc")


class Piece(Struct, frozen=True):
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
        # RECORD lists scripts as ../../../bin/NAME, and .pth files would run code of the old environment.
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
        # pip would otherwise take the copy for an editable installation of the checkout.
        (info / "direct_url.json").unlink(missing_ok=True)  # no longer an editable installation
        (info / "INSTALLER").write_text("edgellm service\n", encoding="utf-8")


STAMP = "edgellm-service.json"
COMMAND = Path("/usr/local/bin/edgellm")  # on the PATH of every user and of sudo (secure_path)


class PrefixSource(Struct, frozen=True):
    """What /opt/edgellm is installed from: the running environment, or the wheels of a folder."""

    wheels: Path | None
    why: str


def unsafe(python: Path, package: Path) -> str | None:
    """Return why a service must not run this Python with this package; None when it may."""
    for path in (python, Path(os.path.realpath(python)), package):
        if within(str(path), (*HOMES, *TEMPORARY)):
            return f"the service cannot see {path} (ProtectHome, PrivateTmp)"
        writable = writable_by_others(path)
        if writable is not None:
            return f"users other than root can change {writable}"
    return None


def running_program() -> tuple[Path, Path]:
    """Return the running interpreter (of its venv) and the package it imports."""
    python = Path(sys.executable).with_name("python")  # sys.executable may be python3 of the same venv
    return python if python.exists() else Path(sys.executable), Path(edge.__file__).parent


def needed(prefix: Path = PREFIX, wheels: Path | None = None) -> PrefixSource | None:
    """Return what /opt/edgellm has to be made of; None where the running Python will do or it is up to date."""
    python, package = running_program()
    why = unsafe(python, package)
    if why is None and (wheels is None or _wheel_version(wheels) in (None, __version__)):
        return None
    source = PrefixSource(wheels, why or f"{wheels} holds another version")
    return None if stamp(prefix) == _mark(source) else source


def service_python(wheels: Path | None = None) -> str:
    """Return the Python for the units: the running one where a service may run it, else that of /opt/edgellm."""
    python, package = running_program()
    safe = unsafe(python, package) is None and needed(wheels=wheels) is None
    return str(python) if safe else PYTHON


def base_python() -> Path:
    """Return the interpreter for the service's venv. Raises UnavailableError when no system-wide one is safe."""
    running = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (running, Path(f"/usr/bin/python{version}"), Path(f"/usr/local/bin/python{version}")):
        real = Path(os.path.realpath(python))
        if real.exists() and not within(str(real), (*HOMES, *TEMPORARY)) and writable_by_others(real) is None:
            return python
    hint = f"install Python {version} for every user (apt install python{version}), or a managed one in /opt"
    raise UnavailableError(
        f"the service cannot run {running}: other users can change it, or it is hidden from it", hint
    )


def make(source: PrefixSource, prefix: Path = PREFIX) -> None:
    """Build a venv beside `prefix` and exchange the two by renames; running processes keep their open files."""
    # Beside the prefix: a rename works within one file system only.
    fresh, former = prefix.with_name(f".{prefix.name}.new"), prefix.with_name(f".{prefix.name}.old")
    for leftover in (fresh, former):
        shutil.rmtree(leftover, ignore_errors=True)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    python = base_python()
    try:
        if source.wheels is None:
            # Without pip: nothing is installed there later, and ensurepip needs a package that Debian splits off.
            run([str(python), "-I", "-m", "venv", "--without-pip", str(fresh)])
            copy_site_packages(pieces(), fresh)
        else:
            hint = "apt install python3-venv, and check that the folder holds wheels for this Python and machine"
            run([str(python), "-I", "-m", "venv", str(fresh)], hint)
            pip = [str(fresh / "bin/python"), "-I", "-m", "pip", "install", "--quiet", "--no-index"]
            run(
                [*pip, "--disable-pip-version-check", "--find-links", str(source.wheels), *_wanted(source.wheels)], hint
            )
        _command(fresh, prefix)
        # The service cannot write there: without this each start would compile everything again.
        run([str(fresh / "bin/python"), "-I", "-m", "compileall", "-q", str(fresh / "lib")])
        (fresh / STAMP).write_text(json.dumps({"schema": 1, "made_of": _mark(source)}) + "\n", encoding="utf-8")
        if prefix.exists():
            prefix.rename(former)
        fresh.rename(prefix)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Install the running edgellm for every user: `python -I -m edge.service.program [PREFIX [COMMAND]]`.

    For `make install`. COMMAND is linked to PREFIX/bin/edgellm; another file of that name stays.
    """
    prefix, command = (Path(text).absolute() for text in (*arguments, *(str(PREFIX), str(COMMAND))[len(arguments) :]))
    try:
        make(PrefixSource(None, "asked for"), prefix)
        target = prefix / "bin/edgellm"
        if not os.path.lexists(command):
            command.parent.mkdir(parents=True, exist_ok=True)
            command.symlink_to(target)
        elif not (command.is_symlink() and command.readlink() == target):
            raise UnavailableError(f"{command} is another program", f"remove it, or run {target}")
    except (EdgeError, OSError) as error:
        hint = getattr(error, "hint", None)
        print(f"error: {error}" + (f" ({hint})" if hint else ""), file=sys.stderr)
        return getattr(error, "exit_code", 1)
    print(f"edgellm {__version__} is installed in {prefix}; every user runs it as {command}")
    return 0


def stamp(prefix: Path = PREFIX) -> str | None:
    """Return what a prefix was installed from; None where `install` did not create it."""
    try:
        made: str = read_json(prefix / STAMP)["made_of"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return made


def _mark(source: PrefixSource) -> str:
    if source.wheels is not None:
        return ", ".join(sorted(f"{wheel.name} {wheel.stat().st_size}" for wheel in source.wheels.glob("*.whl")))
    return ", ".join(sorted(piece.mark for piece in pieces()))


def _wheel_version(wheels: Path) -> str | None:
    found = sorted(wheels.glob("edgellm-*.whl"))
    return found[-1].name.split("-")[1] if found else None


def _wanted(wheels: Path) -> list[str]:
    version = _wheel_version(wheels)
    if version is None:
        raise UnavailableError(f"{wheels} holds no edgellm wheel", "put edgellm-*.whl and its dependencies there")
    extra = "[embedded]" if any(wheels.glob("xllamacpp-*.whl")) else ""
    return [f"edgellm{extra}=={version}"]


def _command(fresh: Path, prefix: Path) -> None:
    """Write bin/edgellm for the final path of the venv."""
    script = fresh / "bin/edgellm"
    python = shlex.quote(str(prefix / "bin/python"))
    script.write_text(f'#!/bin/sh\nexec {python} -I -m edge "$@"\n', encoding="utf-8")
    script.chmod(0o755)


def is_running(python: str) -> bool:
    """Return whether the service's Python is the running one."""
    return Path(python) == running_program()[0]


def must_have_embedded(python: str) -> None:
    """Raise EngineMissingError when the service's Python cannot load the embedded engine."""
    if find_embedded(python) is None:
        hint = "`pip install 'edgellm[embedded]'` in that environment, or build an engine"
        raise EngineMissingError(f"{python} has no embedded engine", hint)
    try:
        run([python, "-I", "-c", "import xllamacpp"])
    except EdgeError as error:
        why = str(error).rpartition("failed: ")[2]
        hint = (
            "on Debian and Ubuntu: `apt-get install libgomp1`"
            if "libgomp" in why
            else "reinstall it in that environment"
        )
        raise EngineMissingError(f"the embedded engine does not load: {why}", hint) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
