from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from edge.linux.procfs import (
    RING_BYTES,
    WINDOW_BYTES,
    WINDOWS,
    Ring,
    listening_sockets,
    lock_holders,
    pids,
    port_owner,
    process_started_s,
    read_boot_id,
    read_stat,
    read_usage,
    resident_ratio,
)


def test_this_process_began_before_now_on_the_same_clock() -> None:
    began = process_started_s()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    by_boottime_s = ticks / os.sysconf("SC_CLK_TCK")
    earlier, boottime, later = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic()
    assert began is not None and began < earlier
    assert earlier - 0.5 < began + boottime - by_boottime_s < later + 0.5
    assert len(read_boot_id() or "") == 36


def test_an_absent_proc_is_none_everywhere(tmp_path: Path) -> None:
    assert (read_boot_id(tmp_path), read_stat(1, tmp_path), read_usage(1, tmp_path)) == (None, None, None)
    assert process_started_s(tmp_path) is None and port_owner(80, tmp_path) is None
    assert list(pids(tmp_path / "none")) == [] and lock_holders(tmp_path, tmp_path) == set()


def test_a_command_name_with_parentheses_does_not_shift_the_fields(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text(f"7 (a) S 1 (b)) Z 3 5 6 {' '.join('0' * 7)} 300 200 {' '.join('0' * 6)} 99 1 2")
    stat = read_stat(7, tmp_path)
    assert stat is not None and (stat.state, stat.parent_pid, stat.session, stat.started_ticks) == ("Z", 3, 6, 99)
    assert stat.cpu_s > 0


def test_vitals_without_io_still_tell_memory_and_cpu_time(tmp_path: Path) -> None:
    """/proc/PID/io is closed with hidepid, in some containers, and in kernels without task accounting."""
    here = tmp_path / "7"
    here.mkdir()
    (here / "stat").write_text(f"7 (llama-server) S {' '.join(['0'] * 10)} 300 200 {' '.join(['0'] * 30)}")
    (here / "status").write_text("VmRSS: 9 kB\nRssAnon: 5 kB\nVmSwap: 0 kB\n")
    seen = read_usage(7, tmp_path)
    assert seen is not None and (seen.rss_anon_bytes, seen.read_bytes) == (5 * 1024, 0) and seen.cpu_s > 0


def test_the_owner_of_a_listening_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (f"(pid {os.getpid()})") in (port_owner(port) or "")
        assert ("127.0.0.1", port) in {(found.address, found.port) for found in listening_sockets()}
    assert port_owner(port) is None


def test_an_ipv6_listener_on_ipv4_is_shown_as_ipv4(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "   0: 0000000000000000FFFF00000100007F:1F90 " + "0" * 32 + ":0000 0A 0:0 0:0 0 0 0 4242 1"
    (tmp_path / "net/tcp6").write_text("header\n" + row + "\nshort row\n")
    assert [tuple(found) for found in listening_sockets(tmp_path)] == [("127.0.0.1", 8080, "4242")]


def test_the_holder_of_a_lock_is_found(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_holders(tmp_path / "lock") == {os.getpid()}
    assert lock_holders(tmp_path / "lock") == set()


def test_what_was_just_written_is_in_memory_and_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(os.urandom(2 * WINDOW_BYTES + 12345))
    assert resident_ratio(path) == 1.0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = resident_ratio(path)
    assert dropped is not None and dropped <= 1.0, "tmpfs keeps its pages, a disk does not"


def test_a_huge_sparse_file_costs_no_more_than_its_windows(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with path.open("wb") as file:
        file.truncate(40 << 30)
    assert resident_ratio(path) == 0.0
    assert WINDOWS * WINDOW_BYTES == 64 << 20


def test_ctrl_c_while_the_kernel_is_asked_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's mmap it became a BufferError: its buffer was still ctypes'."""

    def interrupted(size: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "model").write_bytes(b"x")
    monkeypatch.setattr(ctypes, "create_string_buffer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resident_ratio(tmp_path / "model")


def test_what_cannot_be_told_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_ratio(tmp_path / "empty") is None
    assert resident_ratio(tmp_path / "none") is None
    assert resident_ratio(tmp_path) is None


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u4e2d", "\U0001f600"])
def test_a_ring_of_long_lines_is_bounded_in_bytes(character: str) -> None:
    """2000 lines of 64 KiB are 125 MiB, and up to four times as many where characters take more than a byte."""
    ring = Ring()
    long = [character * (64 << 10) for _ in range(200)]
    for line in long:
        ring.add(line)
    kept = ring.since()
    assert RING_BYTES // 2 < sum(map(sys.getsizeof, kept)) <= RING_BYTES
    assert kept == long[-len(kept) :] and ring.count == 200
    assert ring.since(198) == long[-2:] and ring.since(200) == [] and ring.since(3) == kept
    ring.add("short")
    assert ring.since(200) == ["short"] and ring.since(201) == []


def test_a_ring_keeps_its_last_line_however_long_and_a_number_of_lines() -> None:
    ring = Ring(most=3, most_bytes=1000)
    for line in ("1", "2", "x" * 5000):
        ring.add(line)
    assert ring.since() == ["x" * 5000]
    for line in "abcde":
        ring.add(line)
    assert (ring.since(), ring.count, ring.since(7)) == (["c", "d", "e"], 8, ["e"])
