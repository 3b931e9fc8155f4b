"""A child's control group in the real cgroup v2 of this kernel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.linux.control_group import MOUNTS, PREFIX, create, delegated

ROOT = next((mount for mount in MOUNTS if (mount / "cgroup.procs").exists()), None)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Path]:
    """A group that is marked as delegated, as systemd marks a unit's."""
    if ROOT is None or os.geteuid() or not os.access(ROOT, os.W_OK):
        pytest.skip("needs root and a cgroup v2 that can be written")
    folder = ROOT / f"edgellm-test-{os.getpid()}"
    folder.mkdir()
    try:
        os.setxattr(folder, "trusted.delegate", b"1")
    except OSError:
        folder.rmdir()
        pytest.skip("needs CAP_SYS_ADMIN")
    yield folder
    folder.rmdir()


def proc_of(tmp_path: Path, folder: Path) -> Path:
    """A /proc whose own group is `folder`."""
    (tmp_path / "self").mkdir(exist_ok=True)
    assert ROOT is not None
    (tmp_path / "self/cgroup").write_text(f"4:memory:/x\n0::/{folder.relative_to(ROOT)}\n")
    return tmp_path


def test_only_a_group_that_systemd_marked_is_roots_to_divide(parent: Path, tmp_path: Path) -> None:
    proc = proc_of(tmp_path, parent)
    assert delegated(proc) == parent
    os.removexattr(parent, "trusted.delegate")
    assert delegated(proc) is None and create(proc) is None


def test_without_cgroup_v2_there_is_none(tmp_path: Path) -> None:
    assert create(tmp_path) is None
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/x\n")
    assert create(tmp_path) is None


@pytest.mark.parametrize("old_kernel", [False, True], ids=["cgroup.kill", "before-5.14"])
def test_a_daemon_is_listed_killed_and_its_group_removed(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_kernel: bool
) -> None:
    group = create(proc_of(tmp_path, parent))
    assert group is not None and group.folder.parent == parent
    entry = group.open_procs()
    daemon = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    command = ["python3", "-c", daemon]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.write(entry, b"0"))
    os.close(entry)
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    child.wait(60)
    assert group.pids() == [pid] and os.getsid(pid) == pid
    assert not group.remove(), "the kernel keeps a group that holds a process"
    if old_kernel:
        real = Path.write_text
        monkeypatch.setattr(
            Path, "write_text", lambda path, text: real(path.with_name("gone" * (path.name == "cgroup.kill")), text)
        )
    group.kill()
    child.communicate()  # its pipe ends with the daemon
    assert group.remove(20) and not group.pids()


def test_what_a_killed_supervisor_left_empty_is_removed(parent: Path, tmp_path: Path) -> None:
    (parent / f"{PREFIX}1-1").mkdir()
    other = parent / "other"
    other.mkdir()
    group = create(proc_of(tmp_path, parent))
    assert group is not None
    assert {folder.name for folder in parent.iterdir() if folder.is_dir()} == {"other", group.folder.name}
    group.remove(5)
    other.rmdir()
