"""The tests' own cache and processes after a test run that was killed with SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leftovers
from tests.kept import building, kept, locked
from tests.serving import ROOT, alive, eventually

HALF = """
import sys, time
from pathlib import Path
from tests.kept import kept

def make(folder):
    folder.mkdir()
    (folder / "first").write_text("half")
    print("half", flush=True)
    time.sleep(600)

kept(Path(sys.argv[1]), make, key="a")
"""
# A test run with a child in a session of its own, which has a child without our mark.
RUN = """
import subprocess, sys, time
from tests import leftovers
leftovers.mark()
inner = "import subprocess, sys; subprocess.run(['sleep', '600'], env={})"
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def whole(folder: Path) -> None:
    folder.mkdir()
    (folder / "second").write_text("whole")


def test_a_folder_that_was_half_made_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "folder"
    with python(HALF, str(folder)) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "half\n"
        killed.kill()
    assert (folder / "first").exists()
    kept(folder, whole, key="a")
    assert {path.name for path in folder.iterdir()} == {".complete", "second"}


def test_a_folder_is_made_once_for_each_key(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        whole(folder)

    for key in ("a", "a", "b"):
        assert kept(tmp_path / "folder", make, stamp="ready", key=key) == tmp_path / "folder"
    assert len(made) == 2
    (tmp_path / "folder/ready").write_text("")  # as a power cut can leave a small file
    kept(tmp_path / "folder", make, stamp="ready", key="b")
    assert len(made) == 3


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    kept(folder, whole)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(tmp_path / "python3.99")
    kept(folder, whole)
    assert not (folder / "bin").exists()


def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        whole(folder)
        raise OSError("the index is not reached")

    for _ in range(2):
        with pytest.raises(OSError, match="not reached"):
            kept(tmp_path / "folder", make)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_nothing_is_removed_through_a_mount(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "folder"
    whole(other)
    (folder / "dev").mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(other), str(folder / "dev")], check=True)
    kept(folder, whole)
    assert (other / "second").exists() and not (folder / "dev").exists()


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    with python(HALF, str(tmp_path / "folder")) as killed:
        assert killed.stdout is not None and killed.stdout.readline()
        killed.kill()
    with locked(tmp_path / "folder"):
        pass


def test_a_build_that_power_cut_off_begins_anew(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for marker, kept_objects in (
        (None, True),
        (Path("/proc/sys/kernel/random/boot_id").read_text(), True),
        ("", False),
    ):
        (cache / "build/a").mkdir(parents=True, exist_ok=True)
        (cache / "src").mkdir(exist_ok=True)
        if marker is not None:
            (cache / ".building").write_text(marker)
        with pytest.raises(KeyboardInterrupt), building(cache):
            assert (cache / "build/a").exists() is kept_objects
            raise KeyboardInterrupt
        assert (cache / ".building").exists(), "not complete"
    with building(cache):
        pass
    assert {path.name for path in cache.iterdir()} == {"src"}


def test_processes_of_a_killed_run_are_ended_by_the_next() -> None:
    with python(RUN) as killed:
        assert killed.stdout is not None
        child = int(killed.stdout.readline())
        grandchild = int(eventually(lambda: children_of(child), "no grandchild")[0])
        assert not {child, grandchild} & set(leftovers.sweep()), "their run goes on"
        assert alive(child)
        killed.kill()
    leftovers.sweep()  # or that of another run, which began in this moment
    eventually(lambda: not alive(child) and not alive(grandchild), "they go on")


def test_folders_of_killed_runs_go(tmp_path: Path) -> None:
    marks = {"ours": os.environ[leftovers.MARK], "killed": f"{os.getpid()}:1", "another": "", "third": None}
    for name, text in marks.items():
        (tmp_path / name / "clone").mkdir(parents=True)
        if text is not None:
            (tmp_path / name / "run").write_text(f"{text}\n")
    leftovers.remove_folders(f"{tmp_path}/*/run")
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "another", "third"}


def children_of(pid: int) -> list[str]:
    """Return those past their exec: until then a child has its parent's environment."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in found if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep")]


def test_this_run_is_marked_and_no_leftover() -> None:
    mark = os.environ[leftovers.MARK]
    assert leftovers.runs(mark)
    assert mark.partition(":")[0] == str(os.getpid())
    assert not leftovers.runs(f"{os.getpid()}:1") and not leftovers.runs("") and not leftovers.runs("x:1")
