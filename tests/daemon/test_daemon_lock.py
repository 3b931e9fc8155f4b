from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge.daemon.lock import acquire, held, read_holder
from edge.errors import AlreadyRunningError, UnavailableError
from edge.paths import folders
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


def test_a_lock_file_of_garbage_is_no_holder(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff{")
    assert read_holder(tmp_path / "lock") is None
    assert not held(tmp_path / "none")
