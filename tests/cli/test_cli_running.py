from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import httpx
import pytest
from typer.main import get_command

from edge.cli import main
from edge.cli.app import MODULES, build, nouns
from edge.cli.client import Client, _is_closed, _service_runs, find, not_running
from edge.cli.running import status_lines
from edge.errors import EdgeError, UnavailableError
from edge.linux.files import try_lock
from edge.paths import folders, system_folders


def test_each_command_is_in_the_only_module_that_is_imported_for_it() -> None:
    every = get_command(build()).commands  # type: ignore[attr-defined]
    assert set(every) > set(MODULES)
    for name in every:
        assert len(list(nouns(name))) == 1, name
        assert name in get_command(build(name)).commands, name  # type: ignore[attr-defined]


def test_status_names_the_closed_gate_and_the_failure() -> None:
    gate = {"ready": False, "took_s": None, "evidence": None, "blocked_by": "weights"}
    model = {
        "state": "LOADING",
        "rung": 1,
        "progress": 0.42,
        "restarts": 2,
        "pid": 7,
        "degraded": [{"subject": "rung", "wanted": "0", "got": "1", "because": "memory"}],
        "gates": {"kv_cache": gate},
        "failure": {"kind": "out_of_memory", "hint": "free memory", "evidence": "a\nb"},
    }
    document = {
        "version": "1",
        "status": "starting",
        "uptime_s": 3,
        "urls": ["http://127.0.0.1:1"],
        "profile": "cpu",
        "engine": "e",
        "service": {"unit": "edgellm.service", "warnings": ["x.conf: PrivateDevices=yes hides the GPU"]},
        "models": {"chat": model},
    }
    text = "\n".join(status_lines(document))
    for part in (
        "LOADING on rung 1",
        "2 restarts",
        "weights 42%",
        "waiting for weights",
        "warning: x.conf: PrivateDevices=yes",
        "out_of_memory",
        "| b",
        "memory)",
    ):
        assert part in text, part


@pytest.mark.parametrize("name", ["\udcff", "x" * 100_000])
@pytest.mark.parametrize("command", ["load", "unload"])
def test_a_name_that_no_request_can_carry_is_a_usage_error(tmp_path: Path, command: str, name: str) -> None:
    assert main([command, name, "--state-dir", str(tmp_path)]) in (64, 69)


@pytest.mark.parametrize("status", [200, 403, 500])
@pytest.mark.parametrize("body", [b"[]", b"5", b"no JSON", b"[" * 100_000, b'{"a": "\xff"}', b'{"error": 5}', b""])
def test_an_answer_that_edgellm_does_not_send_is_no_bug(short_dir: Path, body: bytes, status: int) -> None:
    client = Client(folders({}, short_dir))
    client._http = httpx.Client(
        transport=httpx.MockTransport(lambda _: httpx.Response(status, content=body)), base_url="http://edgellm"
    )
    if status == 200 and body.startswith(b'{"error"'):
        assert client.status() == {"error": 5}
    else:
        with pytest.raises(EdgeError, match=r"no edgellm|answered"):
            client.status()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_run_folder_of_another_user_leads_no_command_elsewhere(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /tmp any user may make it first and hold its lock: root asked that process, and changed other keys."""
    short_dir.chmod(0o1777)
    env = {"HOME": str(short_dir / "home"), "XDG_RUNTIME_DIR": str(short_dir / "x")}
    run = short_dir / "x/edgellm/main"
    run.mkdir(parents=True)
    monkeypatch.setattr("edge.cli.client.system_folders", lambda: system_folders()._replace(run=short_dir / "none"))
    with (run / "lock").open("w") as lock:
        assert try_lock(lock)
        assert find(env, None).config == short_dir / "home/.config/edgellm", "this user's own"
        os.chown(short_dir / "x", 12345, 12345)
        assert find(env, None).config == system_folders().config
        monkeypatch.setattr("edge.cli.client.folders", partial(folders, root_user=False))
        with pytest.raises(UnavailableError, match="user 12345 made"):
            find(env, None)


@pytest.mark.parametrize("state", ["active", "activating", "inactive", "failed", "unknown"])
def test_a_closed_run_folder_alone_is_no_service(state: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /run/edgellm that is left of another time, or that root closed, kept every other user from `key add`."""
    env = {"HOME": str(short_dir / "home"), "XDG_RUNTIME_DIR": str(short_dir / "x")}
    monkeypatch.setattr("edge.cli.client.system_folders", lambda: system_folders()._replace(run=short_dir / "closed"))
    monkeypatch.setattr("edge.cli.client._is_closed", lambda lock: lock == short_dir / "closed/main/lock")
    monkeypatch.setattr("edge.cli.client.folders", partial(folders, root_user=False))
    monkeypatch.setattr("edge.linux.systemctl.booted", lambda: True)
    monkeypatch.setattr("edge.linux.systemctl.query", lambda *words: state if words[0] == "is-active" else "")
    own = folders(env, root_user=False)
    if state in ("inactive", "failed"):
        assert find(env, None) == find(env, None, running=False) == own
        assert f"root started by hand in {short_dir}/closed is seen by root only" in str(not_running(own).hint)
        return
    says = "may not enter .* to see whether" if state == "unknown" else "runs as a service"
    with pytest.raises(UnavailableError, match=says) as caught:
        find(env, None)
    assert "usermod -aG edgellm" in str(caught.value.hint)
    if state == "unknown":
        assert find(env, None, running=False) == own
    else:
        with pytest.raises(UnavailableError):
            find(env, None, running=False)


def test_without_systemd_a_closed_run_folder_may_hold_an_edgellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.linux.systemctl.booted", lambda: False)
    assert _service_runs() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_without_permission_is_closed(short_dir: Path) -> None:
    (short_dir / "run").mkdir(mode=0o000)
    assert _is_closed(short_dir / "run/main/lock") and not _is_closed(short_dir / "none/main/lock")
    (short_dir / "run").chmod(0o700)
