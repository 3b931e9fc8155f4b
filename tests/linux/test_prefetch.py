"""Reading ahead of an engine: what is cold is read, what is warm is skipped, and memory stays free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edge.linux import prefetch
from edge.linux.prefetch import CHUNK_BYTES, Prefetch
from edge.linux.procfs import resident_ratio
from tests.serving import ROOT, environment, eventually


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of four chunks and a bit, out of the page cache."""
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(1 << 20) * 33)
    return dropped(path)


def dropped(path: Path) -> Path:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if resident_ratio(path) != 0.0:
        pytest.skip("this file system keeps its pages (tmpfs)")
    return path


def test_a_cold_file_is_read_whole(cold: Path) -> None:
    reader = Prefetch(str(cold), os.getpid(), 0)
    reader.run()
    # The kernel's readahead may have brought a later chunk in already.
    assert (resident_ratio(cold) or 0.0) > 0.99 and reader.read_bytes > 0 and not reader.stopped


def test_what_is_in_the_page_cache_is_not_read_again(cold: Path) -> None:
    with cold.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no readahead beyond what is read
        os.preadv(file.fileno(), [bytearray(2 * CHUNK_BYTES)], 0)
    reader = Prefetch(str(cold), os.getpid(), 0)
    reader.run()
    ratio = resident_ratio(cold)
    # The last pages of a read-ahead may be dropped again on a machine that is short of memory.
    assert reader.read_bytes <= cold.stat().st_size - 2 * CHUNK_BYTES and ratio is not None and ratio > 0.99


def test_it_leaves_the_reserve(cold: Path) -> None:
    reader = Prefetch(str(cold), os.getpid(), prefetch.available() * 2)
    reader.run()
    assert reader.stopped and reader.read_bytes == 0 and resident_ratio(cold) == 0.0


def test_it_ends_when_the_engine_is_gone(cold: Path) -> None:
    engine = subprocess.Popen([sys.executable, "-c", "pass"])
    engine.wait()
    reader = Prefetch(str(cold), engine.pid, 0)
    reader.run()
    assert reader.stopped and reader.read_bytes == 0


def test_it_ends_once_the_engine_has_overtaken_it(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is here the first read itself: from then on every chunk is in the page cache before its turn."""
    really = prefetch.is_resident
    asked: list[int] = []

    def overtaken(descriptor: int, offset: int, length: int) -> bool:
        asked.append(offset)
        return offset > 0 or really(descriptor, offset, length)

    monkeypatch.setattr(prefetch, "is_resident", overtaken)
    reader = Prefetch(str(cold), os.getpid(), 0, ends_when_overtaken=True)
    reader.run()
    assert reader.stopped and reader.read_bytes == CHUNK_BYTES
    assert asked == [0, CHUNK_BYTES, 2 * CHUNK_BYTES], "two chunks are no readahead of the kernel"


PARENT = """
import os, sys, time
from edge.linux import prefetch
fifo = sys.argv[1]
process = prefetch.start([fifo], os.getpid(), 0)
print(process.pid, flush=True)
time.sleep(60)
"""


def test_as_a_process_it_reads_and_ends_with_its_parent(cold: Path, tmp_path: Path) -> None:
    process = prefetch.start([str(cold)], os.getpid(), 0)
    assert process.wait(60) == 0 and (resident_ratio(cold) or 0.0) > 0.99
    fifo = tmp_path / "fifo"  # its open blocks until there is a writer
    os.mkfifo(fifo)
    command = [sys.executable, "-c", PARENT, str(fifo)]
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        status = Path(f"/proc/{pid}/syscall")
        eventually(lambda: status.read_text().split()[0] != "running" and b"prefetch" in cmdline(pid), "it runs")
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: b"prefetch" not in cmdline(pid), "it outlived its parent")


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
