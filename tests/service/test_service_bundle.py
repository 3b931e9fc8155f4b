"""`make bundle`: every wheel that a board needs can be had for its machine and its Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

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
