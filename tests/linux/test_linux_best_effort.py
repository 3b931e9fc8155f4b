"""Logs and terminals that stand still: nothing waits, and what is lost is counted."""

from __future__ import annotations

import fcntl
import os
import pty
import stat
import threading
from pathlib import Path

import pytest

from edge.linux import best_effort
from edge.linux.best_effort import BestEffortWriter, LogFile


def notice(count: int) -> str:
    return f"{count} lost"


def test_two_bounded_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", 1000, notice)
    for number in range(100):
        log.add(f"line {number:02}" + "x" * 40)
    assert log.drain(30)
    log.close()
    old, new = (tmp_path / "a.log.1").read_text(), (tmp_path / "a.log").read_text()
    assert len(old) <= 1000 and len(new) <= 1000 and log.lines_lost == 0
    assert (old + new).splitlines()[-1].startswith("line 99")
    assert stat.S_IMODE((tmp_path / "a.log").stat().st_mode) == 0o600


def test_a_line_longer_than_the_file_is_written_alone(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", 10, notice)
    for text in ("short", "x" * 100, "short"):
        log.add(text)
    log.close()
    assert (tmp_path / "a.log").read_text() == "short\n"
    assert (tmp_path / "a.log.1").read_text() == "x" * 100 + "\n"


def test_a_disk_that_stands_still_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its write(2) does not return: lines beyond the bound are dropped, counted, and said once it goes on."""
    over, real = threading.Event(), os.write

    def write(descriptor: int, data: bytes) -> int:
        over.wait(60)
        return real(descriptor, data)

    monkeypatch.setattr(best_effort, "WAITING_BYTES", 1000)
    monkeypatch.setattr(best_effort.os, "write", write)
    log = LogFile(tmp_path / "a.log", 1 << 20, notice)
    for number in range(100):
        log.add(f"line {number} " + "x" * 90)
    assert 80 < log.lines_lost < 100
    lost = log.lines_lost
    over.set()
    assert log.drain(30)
    log.add("after")
    log.close()
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert f"{lost} lost" in lines and lines[-1] == "after"


def test_a_file_that_is_stdout_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up > FILE`, or StandardOutput=append:FILE, on a disk that stands still: select(2) says that it is writable."""
    over, begun, real = threading.Event(), threading.Event(), os.write

    def write(descriptor: int, data: bytes) -> int:
        begun.set()
        over.wait(60)
        return real(descriptor, data)

    monkeypatch.setattr(best_effort, "DISK_S", 0.01)
    monkeypatch.setattr(best_effort.os, "write", write)
    with (tmp_path / "log").open("w") as file:
        writer = BestEffortWriter(file)
        for number in range(3):
            writer.write(f"line {number}\n")  # each would wait for 60 s
        assert begun.wait(60) and not over.is_set()
        over.set()
        assert best_effort._output_thread().drain(60)
        writer.write("after\n")
        assert best_effort._output_thread().drain(60)
    assert (tmp_path / "log").read_text() == "line 0\nline 1\nline 2\nafter\n"


def test_a_terminal_that_nothing_reads_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh whose network is gone: with room for one byte it is writable, and takes no line."""
    monkeypatch.setattr(best_effort, "DISK_S", 0.01)
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as stream:
        writer = BestEffortWriter(stream)
        for _ in range(3000):
            writer.write("x" * 117 + "\n")  # a terminal holds some of them
        os.close(ours)
        assert best_effort._output_thread().drain(60)


def test_what_follows_a_text_that_was_cut_is_whole() -> None:
    """A pipe takes the begin of a large event: the next one is a line of its own."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", buffering=0) as pipe:
        out = BestEffortWriter(stream)
        # 64 KiB, or 16 pages of 64 KiB on some arm64 kernels.
        for text in ("x" * 2 * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ), "dropped"):
            out.write(text + "\n")
        cut = pipe.read(1 << 20)
        out.write("whole\n")
        assert set(cut) == {ord("x")} and pipe.read(1 << 20) == b"\nwhole\n"


def test_a_full_disk_costs_lines_and_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, real = True, os.write

    def write(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(best_effort.os, "write", write)
    log = LogFile(tmp_path / "a.log", 1 << 20, notice)
    log.add("lost")
    assert log.drain(30)
    full = False
    log.add("kept")
    log.close()
    assert (tmp_path / "a.log").read_text() == "1 lost\nkept\n"


def test_a_fifo_without_a_reader_and_a_link_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("fifo", "link"):
        with pytest.raises(OSError):
            LogFile(tmp_path / name, 1000, notice)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_log_that_another_user_made_first_is_not_written(tmp_path: Path) -> None:
    """The run folder may lie below /tmp: the maker of a file there reads it, with log_prompts the prompts."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "a.log").touch()
    for path in (tmp_path / "theirs", tmp_path / "a.log"):
        os.chown(path, 12345, 12345)
    LogFile(tmp_path / "a.log", 1000, notice).close()  # a closed folder: its owner decides
    tmp_path.chmod(0o1777)
    for name in ("a.log", "theirs/a.log"):
        with pytest.raises(PermissionError, match="another user made it"):
            LogFile(tmp_path / name, 1000, notice)
    assert (tmp_path / "a.log").read_text() == ""
    LogFile(tmp_path / "mine.log", 1000, notice).close()


def test_a_pipe_that_is_not_read_takes_no_time() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as out:
        writer = BestEffortWriter(out)
        for _ in range(100):
            writer.write("x" * 4096)
        writer.write("y")  # it returns
        assert b"y" not in os.read(read_end, 1 << 20)
        os.close(read_end)


def test_lines_that_wait_for_a_disk_hold_up_no_other_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of a slow card ends in time; a stream that waited for all of them held the event loop for seconds."""
    over, real = threading.Event(), os.write

    def write(descriptor: int, data: bytes) -> int:
        over.wait(60)
        return real(descriptor, data)

    monkeypatch.setattr(best_effort.os, "write", write)
    monkeypatch.setattr(best_effort, "DISK_S", 0.01)
    waited: list[float] = []
    with (tmp_path / "out").open("w") as first, (tmp_path / "err").open("w") as second:
        out, err = BestEffortWriter(first), BestEffortWriter(second)
        for number in range(200):
            out.write(f"{number}\n")
        monkeypatch.setattr(best_effort._output_thread(), "_moves_on", lambda _, limit_s: waited.append(limit_s))
        err.write("error\n")
        monkeypatch.undo()
        over.set()
        assert best_effort._output_thread().drain(60)
    assert waited == [0]
    assert (tmp_path / "out").read_text() == "".join(f"{number}\n" for number in range(200))
    assert (tmp_path / "err").read_text() == "error\n"
