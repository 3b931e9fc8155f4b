from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edge.cli.client import Client
from edge.daemon.lock import acquire, held, read_holder
from edge.errors import AlreadyRunningError, UnavailableError
from edge.paths import folders
from edge.plan.start_records import read
from tests.serving import ROOT


def test_the_second_holder_is_told_who_is_first(tmp_path: Path) -> None:
    places = folders({}, tmp_path)
    lock = acquire(places)
    lock.publish(["http://127.0.0.1:8080"])
    with pytest.raises(AlreadyRunningError, match=r"pid \d+.*http://127.0.0.1:8080"):
        acquire(places)
    assert held(places.lock)
    lock.release()
    assert not held(places.lock)
    acquire(places).release()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    """FC-32: whatever happens to a supervisor, the next one can start."""
    code = (
        "import os, signal, pathlib; from edge.paths import folders; from edge.daemon.lock import acquire\n"
        f"acquire(folders({{}}, pathlib.Path({str(tmp_path)!r}))); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9
    places = folders({}, tmp_path)
    assert not held(places.lock) and read_holder(places.lock) is not None
    acquire(places).release()


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UnavailableError, match="run folder"):
        acquire(folders({}, tmp_path)._replace(run=blocked / "run"))


def test_a_disk_without_locks_is_named_and_no_other_edgellm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2) on some NFS mounts: "already running" sent its reader to a process that is not there."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    places = folders({}, tmp_path)
    acquire(places).release()
    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(UnavailableError, match=r"run folder .*: No locks available"):
        acquire(places)
    assert not held(places.lock)


def test_a_full_run_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inode was left for the lock file, and no block for its content."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    places = folders({}, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UnavailableError, match=rf"{places.instance_run}: No space left") as caught:
            acquire(places)
    assert caught.value.hint is not None and f"df -h {places.instance_run}" in caught.value.hint
    assert not held(places.lock)
    acquire(places).release()


def test_a_lock_file_of_garbage_is_no_holder(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff{")
    assert read_holder(tmp_path / "lock") is None
    assert not held(tmp_path / "none")


def test_a_run_folder_that_another_user_prepared_is_refused(tmp_path: Path, short_dir: Path) -> None:
    """Any user may make /tmp/edgellm-UID first: its lock file could be a link, its socket another program."""
    victim = tmp_path / "victim"
    victim.write_text("secret")
    short_dir.chmod(0o777)
    run = short_dir / "run"
    (run / "main").mkdir(parents=True)
    (run / "main/lock").symlink_to(victim)
    places = folders({}, tmp_path)._replace(run=run)
    with pytest.raises(UnavailableError, match="run folder"):
        acquire(places)  # O_NOFOLLOW
    if os.geteuid() == 0:
        (run / "main/lock").unlink()
        os.chown(run, 12345, 12345)
        with pytest.raises(UnavailableError, match="belongs to user 12345"):
            acquire(places)
        with pytest.raises(UnavailableError, match="another user"):
            Client(places)
    assert victim.read_text() == "secret"


def test_a_linked_run_folder_is_refused(tmp_path: Path, short_dir: Path) -> None:
    (short_dir / "run").symlink_to(tmp_path)
    places = folders({}, tmp_path)._replace(run=short_dir / "run")
    with pytest.raises(UnavailableError, match="run folder"):
        acquire(places)
    with pytest.raises(UnavailableError, match="another user"):
        Client(places)


def test_a_run_folder_that_a_lax_umask_left_open_is_closed(tmp_path: Path, short_dir: Path) -> None:
    places = folders({}, tmp_path)._replace(run=short_dir / "run")
    places.instance_run.mkdir(parents=True)
    places.run.chmod(0o775)
    places.instance_run.chmod(0o777)
    acquire(places).release()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (places.run, places.instance_run)] == [0o755, 0o755]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can meet a folder of the service's user")
def test_root_does_not_work_in_the_state_folder_of_the_service(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = folders({}, tmp_path)._replace(run=short_dir / "run")
    monkeypatch.setattr("edge.daemon.lock.system_folders", lambda: places)
    places.state.mkdir()
    acquire(places).release()
    os.chown(places.state, 12345, 12345)
    with pytest.raises(UnavailableError, match="root does not work in it"):
        acquire(places)


def test_a_fifo_or_deep_brackets_in_place_of_a_file_hold_nothing_up(tmp_path: Path) -> None:
    lock, records = tmp_path / "lock", tmp_path / "starts.jsonl"
    for path in (lock, records):
        os.mkfifo(path)
    assert read_holder(lock) is None and not held(lock)
    assert read(records) == []
    for path in (lock, records):
        path.unlink()
        path.write_text("[" * 100_000 + '\n{"at": 1}\n')
    assert read_holder(lock) is None
    assert read(records) == [{"at": 1}]
