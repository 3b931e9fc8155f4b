"""`edgellm service` by an ordinary user: it runs itself again under sudo."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from edge.cli import main
from edge.paths import system_folders
from edge.service.takeover import source_folders


@pytest.fixture
def ordinary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An ordinary user with a sudo; what would be executed is kept."""
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\n")
    sudo.chmod(0o755)
    executed: list[list[str]] = []

    def execute(path: str, arguments: list[str]) -> None:
        executed.append([path, *arguments[1:]])
        raise SystemExit(0)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "execv", execute)
    return executed


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_it_runs_itself_under_sudo_by_its_full_path(
    ordinary: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["edgellm", "service", verb, "--yes"])
    assert main(["service", verb, "--yes"]) == 0
    run = [str(tmp_path / "sudo"), "--", sys.executable, "-I", "-m", "edge", "service", verb, "--yes"]
    assert ordinary == [run]


def test_without_sudo_the_command_is_shown(
    ordinary: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "argv", ["edgellm", "service", "uninstall"])
    assert main(["service", "uninstall"]) == 64
    assert f"{sys.executable} -I -m edge service uninstall" in capsys.readouterr().err
    assert ordinary == []


def test_a_sudo_that_gives_no_rights_is_not_asked_twice(
    ordinary: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_UID", "1000")
    assert main(["service", "uninstall"]) == 64
    assert ordinary == []


def test_a_dry_run_without_sudo_shows_what_sudo_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look into the folders of the user; root itself into the system's."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    own = source_folders({"HOME": "/home/ann", "XDG_DATA_HOME": "/srv/ann"})
    assert own.data == Path("/srv/ann/edgellm")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    other = pwd.getpwnam("daemon")
    assert source_folders({"SUDO_UID": str(other.pw_uid)}).data == Path(other.pw_dir) / ".local/share/edgellm"
    assert source_folders({}) == system_folders()
