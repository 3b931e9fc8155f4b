"""`make bundle`: every wheel that a board needs can be had for its machine and its Python."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from edge.builder import install
from edge.engine.installed import SelectedEngine, read_selection, write_selection
from edge.paths import folders
from edge.service.takeover import OfflineBundle
from tests.builder.installing import put
from tests.fakes.gguf_writer import Gguf
from tests.fakes.toolchain.programs import program
from tests.serving import environment

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"edgellm", "aiohttp", "msgspec", "xllamacpp", "typer"}


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.10", "3.12"])
def test_wheels_for_a_jetson(tmp_path: Path, version: str) -> None:
    """JetPack 6 has Python 3.10 and glibc 2.35, JetPack 7 has 3.12 and 2.39."""
    command = [str(ROOT / "build/bundle.sh"), sys.executable, str(tmp_path), "aarch64", version]
    subprocess.run(command, check=True, env={**os.environ, "WHEELS_ONLY": "1"}, capture_output=True)
    assert (tmp_path / "install.sh").read_text().startswith("#!/bin/sh")
    names = set()
    for wheel in (tmp_path / "wheels").iterdir():
        name, _, _, tags = parse_wheel_filename(wheel.name)
        names.add(name)
        assert any(fits(tag, version.replace(".", "")) for tag in tags), wheel.name
    assert names >= NEEDED


def fits(tag: Tag, python: str) -> bool:
    """`cp310-cp310-manylinux_2_28_aarch64`, `cp38-abi3-…` and `py3-none-any` run under CPython 3.10 on an Orin."""
    glibc = re.fullmatch(r"manylinux_2_(\d+)_aarch64", tag.platform)
    machine = tag.platform in ("any", "linux_aarch64", "manylinux2014_aarch64") or (glibc and int(glibc[1]) <= 35)
    own = tag.interpreter in (f"cp{python}", "py3", "py2.py3") or (tag.abi == "abi3" and int(tag.interpreter[3:]) <= 12)
    return bool(machine and own)


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder with an engine that is in use and a model. An import proves the engine as this user."""
    monkeypatch.setattr(install, "unprivileged", lambda: None)
    places = folders({}, tmp_path / "state")
    put(places.engines, "a-cpu-1")
    write_selection(places.engines, SelectedEngine("a-cpu-1"))
    Gguf("llama").model().save(places.models / "Tiny-Q5_K_M.gguf")
    return tmp_path / "state"


def bundle(python: Path | str, out: Path, machine: str, state: Path) -> str:
    """Run build/bundle.sh for this Python's version; return what it said on stderr."""
    version = ".".join(platform.python_version_tuple()[:2])
    command = [str(ROOT / "build/bundle.sh"), str(python), str(out), machine, version]
    env = {**environment({"EDGELLM_STATE_DIR": str(state)}), "WHEELS_ONLY": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def assert_whole(out: Path, engines: Path) -> None:
    """What `edgellm service install --offline` reads is there, and the engine can be imported."""
    offline = OfflineBundle(out)
    assert offline.wheels and offline.engine == out / "engine.tar.gz"
    assert [path.name for path in offline.models.iterdir()] == ["Tiny-Q5_K_M.gguf"]
    install.import_engine(engines, offline.engine)
    assert read_selection(engines).current == "a-cpu-1"


@pytest.fixture
def without_index(tmp_path: Path) -> Path:
    """A Python that builds an empty wheel and downloads nothing; all else is the real one, `edgellm` beside it."""
    real = f'exec "{sys.executable}"'
    program(tmp_path / "bin/edgellm", f'{real} -m edge "$@"')
    return program(
        tmp_path / "bin/python",
        f"""case "$1 $2 $3" in
"-m build --wheel") touch "$5/edgellm-0-py3-none-any.whl" ;;
"-m pip download") ;;
*) {real} "$@" ;;
esac""",
    )


def test_a_bundle_for_machines_like_this_one_has_the_engine_and_the_models(
    tmp_path: Path, filled: Path, without_index: Path
) -> None:
    assert bundle(without_index, tmp_path / "out", os.uname().machine, filled) == ""
    assert_whole(tmp_path / "out", tmp_path / "engines")


def test_a_bundle_for_other_machines_says_that_it_has_no_engine(
    tmp_path: Path, filled: Path, without_index: Path
) -> None:
    said = bundle(without_index, tmp_path / "out", "riscv64", filled)
    assert "no engine is in it" in said and "edgellm engine export" in said and "riscv64" in said
    offline = OfflineBundle(tmp_path / "out")
    assert offline.engine is None and any(offline.models.iterdir())


@pytest.mark.full
def test_a_bundle_of_the_real_wheels(tmp_path: Path, filled: Path) -> None:
    bundle(sys.executable, tmp_path / "out", os.uname().machine, filled)
    assert_whole(tmp_path / "out", tmp_path / "engines")
    assert {parse_wheel_filename(wheel.name)[0] for wheel in (tmp_path / "out/wheels").iterdir()} >= NEEDED
