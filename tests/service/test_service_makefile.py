"""`make` in a checkout whose Python is too old, or lacks venv, ends with one sentence before anything is made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import lacks

ROOT = Path(__file__).resolve().parents[2]
# A Python as JetPack 5 has it: what `-c` gives it runs under another version_info.
OLD = """#!{python} -I
import sys
assert sys.argv[1] == "-c", sys.argv
sys.version_info = {version}
exec(sys.argv[2])
"""
# Debian's python3 without the package python3-venv.
WITHOUT_VENV = """#!{python} -I
import sys
assert sys.argv[1] == "-c", sys.argv
sys.modules["ensurepip"] = None
exec(sys.argv[2])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if not Path("/usr/bin/make").exists():
        lacks("no make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def refused(checkout: Path, text: str) -> str:
    """Run `make up` with a stub interpreter; return what it says."""
    stub = checkout / "python"
    stub.write_text(text)
    stub.chmod(0o755)
    # Not the environment's: MAKEFLAGS of a `make test` would pass its own PYTHON on.
    done = subprocess.run(
        ["/usr/bin/make", "up", f"PYTHON={stub}"],
        cwd=checkout,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    # make itself exits with 2 and names the code of its command.
    assert done.returncode == 2 and "Error 69" in done.stderr, done
    assert sorted(path.name for path in checkout.iterdir()) == ["Makefile", "pyproject.toml", "python"]
    return done.stdout


@pytest.mark.parametrize("version", [(3, 8, 10), (3, 9, 2)])
def test_a_python_before_3_10_is_refused_with_the_way_to_another(checkout: Path, version: tuple[int, ...]) -> None:
    said = refused(checkout, OLD.format(python=sys.executable, version=(*version, "final", 0)))
    assert said.count("\n") == 1 and said.startswith("edgellm needs Python 3.10 or newer: make PYTHON=python3.12")
    assert "uv python install" in said


def test_a_python_without_venv_is_refused_with_the_package(checkout: Path) -> None:
    assert refused(checkout, WITHOUT_VENV.format(python=sys.executable)).startswith("python3-venv is missing")
