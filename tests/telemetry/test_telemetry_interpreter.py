"""Finding the Python of the jtop service, without running what a stranger put there."""

import os
import sys
from pathlib import Path

import pytest

from edge.telemetry import jtop
from tests.fakes.fake_jetson.files import put


def process(root: Path, *words: str, pid: int = 700) -> Path:
    folder = root / f"proc/{pid}"
    put(folder / "cmdline", "\0".join(words).encode() + b"\0")
    return folder


def python(folder: Path, name: str = "python3.10") -> Path:
    put(folder / name, b"#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return folder / name


def test_of_the_running_service(tmp_path: Path) -> None:
    path = python(tmp_path / "venv/bin")
    process(tmp_path, "/usr/bin/python3", "/usr/bin/something", "--force", pid=5)
    process(tmp_path, str(path), "/usr/local/bin/jtop", "--force")
    assert jtop.find(tmp_path) == path


def test_a_jtop_terminal_is_not_the_service(tmp_path: Path) -> None:
    process(tmp_path, str(python(tmp_path / "bin")), "/usr/local/bin/jtop")
    assert jtop.find(tmp_path) is None


@pytest.mark.parametrize("prefix", ["", "-", "!!"])
def test_of_the_unit_s_program(tmp_path: Path, prefix: str) -> None:
    path = python(tmp_path / "opt/jtop/bin", "python3")
    put(tmp_path / "etc/systemd/system/jtop.service", f"[Service]\nExecStart={prefix}/usr/local/bin/jtop --force\n")
    put(tmp_path / "usr/local/bin/jtop", f"#!{path} -sE\nimport jtop\n".encode())
    assert jtop.find(tmp_path) == path


@pytest.mark.parametrize("shebang", ["#!/usr/bin/env python3", "#!/bin/sh", "#!python3", ""])
def test_a_shebang_that_names_no_python_is_not_guessed(tmp_path: Path, shebang: str) -> None:
    put(tmp_path / "lib/systemd/system/jtop.service", "[Service]\nExecStart=/usr/local/bin/jtop --force\n")
    put(tmp_path / "usr/local/bin/jtop", f"{shebang}\n".encode())
    assert jtop.find(tmp_path) is None


def test_nothing_there(tmp_path: Path) -> None:
    assert jtop.find(tmp_path) is None


@pytest.mark.parametrize("weak", ["the file", "its folder", "a folder above", "owner"])
def test_what_others_can_write_is_not_run(tmp_path: Path, weak: str) -> None:
    """Any user can start a process that looks like jtop's service."""
    path = python(tmp_path / "a/b")
    assert jtop.trusted(path)
    if weak == "owner" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    if weak == "owner":
        os.chown(path, 12345, -1)
    else:
        {"the file": path, "its folder": path.parent, "a folder above": path.parent.parent}[weak].chmod(0o777)
    process(tmp_path, str(path), "/usr/local/bin/jtop", "--force")
    assert jtop.find(tmp_path) is None


def test_a_link_is_followed_to_what_it_runs(tmp_path: Path) -> None:
    real = python(tmp_path / "open")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin/python3"
    link.symlink_to(real)
    assert not jtop.trusted(link)
    assert jtop.trusted(Path(sys.executable))
