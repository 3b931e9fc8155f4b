"""A checkout becomes an installation that needs neither the checkout nor a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge.service import program
from edge.service.program import ROOT, _required, copy_site_packages, pieces

# Big, and not needed to print a help text.
BIG = {"numpy", "xllamacpp", "huggingface-hub", "hf-xet", "gguf", "aiohttp", "jetson-stats"}


def test_development_tools_stay_behind() -> None:
    names = {piece.mark.split()[0] for piece in pieces()}
    assert {ROOT, "aiohttp", "typer", "httpx"} <= names
    assert not names & {"pytest", "mypy", "ruff", "hypothesis"}


def test_requirements_are_read() -> None:
    assert _required("aiohttp>=3.9", frozenset()) == ("aiohttp", frozenset())
    assert _required("Foo_Bar[a, b]>=1; python_version >= '3.8'", frozenset()) == ("foo-bar", frozenset({"a", "b"}))
    assert _required("brotli; extra == 'speedups'", frozenset()) is None
    assert _required("brotli; extra == 'speedups'", frozenset({"speedups"})) == ("brotli", frozenset())
    assert _required('xllamacpp>=2026.9; extra == "embedded"', None) == ("xllamacpp", frozenset())
    assert _required('pytest>=8; extra == "dev"', None) is None


def test_the_copy_runs_alone(tmp_path: Path) -> None:
    venv = tmp_path / "a b"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", str(venv)], check=True)
    copy_site_packages([piece for piece in pieces() if piece.mark.split()[0] not in BIG], venv)
    ask = "import edge, edge.resources as r; print(edge.__file__); print(r.data_dir('systemd') / 'edgellm.service')"
    said = subprocess.run([venv / "bin/python", "-I", "-c", ask], capture_output=True, text=True, check=True).stdout
    package, unit = said.splitlines()
    assert package.startswith(str(venv))
    assert unit.startswith(str(venv))
    assert Path(unit).is_file()
    run = [str(venv / "bin/python"), "-I", "-m", "edge", "service", "install", "--help"]
    done = subprocess.run(run, capture_output=True, text=True, cwd="/", check=False)
    assert "--offline" in done.stdout, done.stderr[-2000:]


def test_the_command_starts_the_python_of_a_prefix_with_any_name(tmp_path: Path) -> None:
    prefix = tmp_path / "a $HOME \"b\" 'c' `touch here` $(touch here) \\ d"
    (prefix / "bin").mkdir(parents=True)
    python = prefix / "bin/python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    program._command(prefix, prefix)
    run = [prefix / "bin/edgellm", "status", "$x"]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [str(python), "-I", "-m", "edge", "status", "$x"]
    assert [path.name for path in tmp_path.iterdir()] == [prefix.name]


@pytest.mark.parametrize("path", ["/home/ann/venv/bin/python", "/root/venv/bin/python", "/tmp/v/bin/python"])
def test_a_service_does_not_run_what_it_cannot_see(path: str) -> None:
    why = program.unsafe(Path(path), Path("/usr/lib/python3/edge"))
    assert why is not None
    assert "cannot see" in why


def test_a_service_does_not_run_what_others_can_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TEMPORARY", ())
    python = tmp_path / "python"
    python.write_text("")
    tmp_path.chmod(0o777)
    why = program.unsafe(python, python)
    assert why is not None
    assert "users other than root can change" in why
