"""Under systemd: the own unit's name, and a stop that lasts although the socket unit listens on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from edge.cli import running
from edge.errors import EdgeError, UnavailableError
from edge.linux import sockets
from edge.service import unit
from edge.service.unit import Unit, holds, own


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/system.slice/edgellm.service\n", Unit("edgellm.service")),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/edge.service\n", Unit("edge.service", user=True)),
        (
            "4:memory:/system.slice/edgellm.service\n1:name=systemd:/system.slice/edgellm.service\n",
            Unit("edgellm.service"),
        ),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-x.scope\n", None),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_unit_is_the_one_that_our_control_group_belongs_to(
    cgroup: str, expected: Unit | None, tmp_path: Path
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup)
    assert own(tmp_path) == expected


def test_no_proc_is_no_unit(tmp_path: Path) -> None:
    assert own(tmp_path) is None


def test_a_unit_survives_the_control_socket() -> None:
    for each in (Unit("edgellm.service"), Unit("mine.service", user=True)):
        assert Unit.of(each.document()) == each
    assert Unit("mine.service", user=True).stop_command == [
        "systemctl",
        "--user",
        "stop",
        "mine.socket",
        "mine.service",
    ]


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a program of this name that records its command line."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    lines = ("#!/bin/sh", f'echo "$@" >> {tmp_path}/calls', f'exit "$(cat {tmp_path}/rc 2>/dev/null || echo 0)"')
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="as root")
@pytest.mark.parametrize("listens", [True, False])
def test_stop_of_a_service_stops_its_socket_first(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """Only the unit in which the process that listens runs: as root its word could stop any unit of the machine."""

    class Client:
        class folders:
            lock = systemctl / "no-lock"
            control_socket = systemctl / "control.sock"

        def status(self) -> dict[str, Any]:
            return {"service": Unit("edgellm.service").document()}

        def stop(self, *, now: bool) -> None:
            raise AssertionError("the socket would start it again")

    monkeypatch.setattr(running, "client_of", lambda _: Client())
    monkeypatch.setattr(sockets, "listener_pid", lambda path: 7 if path == Client.folders.control_socket else 0)
    monkeypatch.setattr(unit, "holds", lambda named, pid: listens and (named.name, pid) == ("edgellm.service", 7))
    if not listens:
        with pytest.raises(UnavailableError):
            running.stop(state_dir=None, now=False)
        assert not (systemctl / "calls").exists()
        return
    running.stop(state_dir=None, now=False)
    assert (systemctl / "calls").read_text() == "stop edgellm.socket edgellm.service\n"


def test_a_systemctl_that_fails_is_told(systemctl: Path) -> None:
    (systemctl / "rc").write_text("5")
    with pytest.raises(EdgeError):
        unit.stop(Unit("edgellm.service", user=True))


def test_who_may_not_is_given_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError) as caught:
        unit.stop(Unit("edgellm.service"))
    assert caught.value.hint == "sudo systemctl stop edgellm.socket edgellm.service"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("11950000\n", 11.95), ("0\n", None), ("\n", None), ("[not set]\n", None)],
)
def test_the_start_of_the_service_is_systemds_own_time(
    printed: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nprintf %s "{printed}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert unit.begun_s(Unit("mine.service", user=True)) == expected
    asked = (tmp_path / "asked").read_text()
    assert asked == "--user show --property=InactiveExitTimestampMonotonic --value mine.service\n"


def test_without_systemd_the_start_of_a_service_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unit.begun_s(Unit("mine.service")) is None


def test_a_unit_that_the_listening_process_is_not_in_is_not_stopped(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text("0::/system.slice/edgellm.service/supervisor\n")
    assert holds(Unit("edgellm.service"), 7, tmp_path)
    for name in ("ssh.service", "system.slice", "supervisor", "-Hroot@x", ""):
        assert not holds(Unit(name), 7, tmp_path)
    assert not holds(Unit("edgellm.service"), 0, tmp_path)
