"""Interpreters with the real jetson-stats from the package index, kept in the cache home between runs.

7.x has a wheel. 4.3.2 is a source archive whose installation as root would install and start a system service: it is
downloaded as user `nobody` (a user namespace) and its package is unpacked, not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.kept import kept, python_of

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgellm-tests"


def jtop_python(version: str, base: Path = Path(sys.executable)) -> Path:
    """The Python of a virtual environment that has jetson-stats `version`. Raises CalledProcessError when offline."""
    tag = f"{sys.version_info.major}.{sys.version_info.minor}" if base == Path(sys.executable) else base.name
    home = _CACHE / f"jtop-{version}-{tag}"
    python = python_of(home)

    def make(_: Path) -> None:
        subprocess.run([base, "-m", "venv", home], check=True)
        if version.startswith("4."):
            _unpack(python, version)
        else:
            _pip(python, "install", f"jetson-stats=={version}")

    kept(home, make, stamp="ready")
    return python


def _pip(python: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
    command = [*prefix, str(python), "-m", "pip", arguments[0], "-q", "--disable-pip-version-check", *arguments[1:]]
    subprocess.run(command, check=True, capture_output=True)


def _unpack(python: Path, version: str) -> None:
    _pip(python, "install", "smbus2", "distro", "setuptools")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--no-deps", "--no-binary", "jetson-stats", f"jetson-stats=={version}", "-d", folder]
        _pip(python, "download", *arguments, prefix=("unshare", "--user"))
        archive = next(Path(folder).glob("*.tar.gz"))
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(folder)
        shutil.copytree(next(Path(folder).glob("jetson*/jtop")), Path(target) / "jtop")
