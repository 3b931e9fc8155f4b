"""The Python that runs the service: ours if nobody else can change it and the service can see it, else /opt/edgellm."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import edge
from edge import __version__
from edge.engine.embedded_engine import find_embedded
from edge.errors import EdgeError, EngineMissingError, UnavailableError
from edge.service.closure import pieces, put
from edge.service.obstacle import writable_by_others
from edge.service.systemctl import run
from edge.service.unitfile import HOMES, TEMPORARY, within
from edge.service.wish import PREFIX

STAMP = "edgellm-service.json"


@dataclass(frozen=True, slots=True)
class Source:
    """What /opt/edgellm is made of: what runs now, or the wheels of a folder."""

    wheels: Path | None
    why: str


def unsafe(python: Path, package: Path) -> str | None:
    """Why a service must not run this Python with this edge; None when it may."""
    for path in (python, Path(os.path.realpath(python)), package):
        if within(str(path), (*HOMES, *TEMPORARY)):
            return f"{path} is where the service cannot look (ProtectHome, PrivateTmp)"
        writable = writable_by_others(path)
        if writable is not None:
            return f"{writable} can be changed by others than root"
    return None


def here() -> tuple[Path, Path]:
    """The running interpreter (of its venv) and the package it imports."""
    python = Path(sys.executable).with_name("python")  # a script may have called it python3
    return python if python.exists() else Path(sys.executable), Path(edge.__file__).parent


def needed(prefix: Path = PREFIX, wheels: Path | None = None) -> Source | None:
    """None: the running Python can be used as it is, or /opt/edgellm is already what it would be made of."""
    python, package = here()
    why = unsafe(python, package)
    if wheels is not None and why is None and _wheel_version(wheels) in (None, __version__):
        return None
    if wheels is None and why is None:
        return None
    source = Source(wheels, why or f"{wheels} holds another version")
    return None if stamp(prefix) == _mark(source) else source


def service_python(prefix: Path = PREFIX, wheels: Path | None = None) -> str:
    """Which Python the units name: ours where a service may run it."""
    python, package = here()
    ours = unsafe(python, package) is None and needed(prefix, wheels) is None
    return str(python if ours else prefix / "bin/python")


def base_python() -> Path:
    """The interpreter that a venv for the service links to. Raises UnavailableError when all are private."""
    ours = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (ours, Path(f"/usr/bin/python{version}"), Path(f"/usr/local/bin/python{version}")):
        real = Path(os.path.realpath(python))
        if real.exists() and not within(str(real), (*HOMES, *TEMPORARY)) and writable_by_others(real) is None:
            return python
    hint = f"install Python {version} for every user (apt install python{version}), or put a managed one into /opt"
    raise UnavailableError(f"the service cannot run {ours}: others can change it or the service cannot see it", hint)


def make(source: Source, prefix: Path = PREFIX) -> None:
    """Builds a venv beside `prefix` and exchanges the two by renames; who runs keeps the files he has open."""
    fresh, former = prefix.with_name(f".{prefix.name}.new"), prefix.with_name(f".{prefix.name}.old")
    for leftover in (fresh, former):
        shutil.rmtree(leftover, ignore_errors=True)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    python = base_python()
    try:
        if source.wheels is None:
            run([str(python), "-I", "-m", "venv", "--without-pip", str(fresh)])
            put(pieces(), fresh)
        else:
            hint = "apt install python3-venv, and see that the folder holds the wheels for this Python and machine"
            run([str(python), "-I", "-m", "venv", str(fresh)], hint)
            pip = [str(fresh / "bin/python"), "-I", "-m", "pip", "install", "--quiet", "--no-index"]
            run(
                [*pip, "--disable-pip-version-check", "--find-links", str(source.wheels), *_wanted(source.wheels)], hint
            )
        _command(fresh, prefix)
        run([str(fresh / "bin/python"), "-I", "-m", "compileall", "-q", str(fresh / "lib")])
        (fresh / STAMP).write_text(json.dumps({"schema": 1, "made_of": _mark(source)}) + "\n", encoding="utf-8")
        if prefix.exists():
            prefix.rename(former)
        fresh.rename(prefix)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def stamp(prefix: Path = PREFIX) -> str | None:
    """What a prefix that we made was made of; None when it is not ours."""
    try:
        made: str = json.loads((prefix / STAMP).read_text(encoding="utf-8"))["made_of"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return made


def _mark(source: Source) -> str:
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
    """bin/edgellm, for the path where the venv will be."""
    script = fresh / "bin/edgellm"
    script.write_text(f'#!/bin/sh\nexec "{prefix}/bin/python" -I -m edge "$@"\n', encoding="utf-8")
    script.chmod(0o755)


def is_running(python: str) -> bool:
    """The service's Python is this one, so that what was found here is there."""
    return Path(python) == here()[0]


def must_have_embedded(python: str) -> None:
    """Raises EngineMissingError when the service's Python cannot load the embedded engine."""
    if find_embedded(python) is None:
        hint = "`pip install 'edgellm[embedded]'` there, or build an engine"
        raise EngineMissingError(f"{python} has no embedded engine", hint)
    try:
        run([python, "-I", "-c", "import xllamacpp"])
    except EdgeError as error:
        why = str(error).rpartition("failed: ")[2]
        hint = "on Debian and Ubuntu: `apt-get install libgomp1`" if "libgomp" in why else "reinstall it there"
        raise EngineMissingError(f"the embedded engine does not load: {why}", hint) from error
