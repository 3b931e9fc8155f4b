"""jtop through its real service and client, on a fake board."""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from edge.telemetry import jtop, jtop_share
from edge.telemetry.jtop import JtopSource
from edge.telemetry.jtop_line import JtopFault, jtop_fault
from edge.telemetry.jtop_share import JtopShare, bind
from tests.fakes.fake_jetson.client import jtop_python
from tests.fakes.fake_jetson.service import JtopService
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.fakes.waiting import running, until

SOON = (0.1, 0.5)


def readers() -> list[psutil.Process]:
    """Reader processes of this test run."""
    return [p for p in psutil.Process().children() if any("jtop_reader" in word for word in p.cmdline())]


def watched(**options: object) -> JtopSource:
    source = JtopSource(pauses_s=SOON, **options)  # type: ignore[arg-type]
    source.set_interval(1.0)
    return source


def shows(source: JtopSource, watts: float, celsius: float) -> bool:
    sample = source.latest
    power = sample.power_w if sample else None
    return power is not None and abs(power - watts) < 0.1 and sample is not None and sample.temp_c == celsius


async def test_fc70_values_follow_live_and_a_killed_service_is_outlived(
    board: FakeBoard, service: JtopService, caplog: pytest.LogCaptureFixture
) -> None:
    """FC-70, FC-67: after the service died, a new reader in a new process recovers; one log line per change.

    The interpreter is found from the running service's own command line.
    """
    caplog.set_level(logging.INFO, "edge.telemetry")
    source = watched()
    async with running(source.run()):
        for watts, celsius in [(10.0, 50.0), (45.0, 95.0)]:
            board.set_total_power(watts)
            board.set_all_temps(celsius)
            await until(lambda w=watts, c=celsius: shows(source, w, c))
        first = readers()
        service.kill()
        await until(lambda: source.fault)
        assert source.fresh(source.latest.at_s + 1.0) is source.latest
        assert source.fresh(source.latest.at_s + 3.5) is None
        service.clean()
        service.start()
        await until(lambda: source.fault is None)
        assert readers() != first
    assert readers() == []
    lines = [record.message for record in caplog.records]
    assert lines[0] == "telemetry: jtop answers"
    assert lines[-1] == "telemetry: jtop answers again"
    assert all(line.startswith("telemetry: no jtop: ") for line in lines[1:-1])
    assert 1 <= len(lines[1:-1]) <= 3  # lost, then not active, then perhaps no socket: each once


def test_fc68_each_socket_fault_has_its_own_remedy() -> None:
    """FC-68: no socket, a folder in its place, no permission: three causes, three remedies."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "jtop.sock"
        causes = [jtop.socket_fault(path)]
        path.mkdir()
        causes.append(jtop.socket_fault(path))
        path.rmdir()
        listener.bind(str(path))
        assert jtop.socket_fault(path) is None
        path.chmod(0o600 if os.geteuid() == 0 else 0)
        causes.append(without_the_group(path) if os.geteuid() == 0 else jtop.socket_fault(path))
    assert [cause.kind for cause in causes] == ["no_socket", "socket_is_directory", "no_access"]
    assert len({cause.hint for cause in causes}) == 3


def without_the_group(path: Path) -> JtopFault:
    """Return the fault that a user without the group finds, in a child without privileges."""
    path.parent.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        try:  # a second test run must not continue from here
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os._exit(0 if jtop.socket_fault(path) == jtop_fault("no_access") else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return jtop_fault("no_access")


async def test_a_machine_without_jtop_is_silent(caplog: pytest.LogCaptureFixture, jtop_lock: None) -> None:
    caplog.set_level(logging.INFO, "edge.telemetry")
    source = JtopSource(pauses_s=(0.01, 0.01))
    async with running(source.run()):
        await until(lambda: source.restarts >= 3)
    assert source.fault is not None
    assert source.fault.kind == "no_socket"
    assert caplog.records == []


def no_thread() -> Path:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("find", [None, no_thread], ids=["no process", "no thread"])
async def test_a_reader_that_cannot_be_started_is_said_once_and_tried_again(
    find: Callable[[], Path] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, short_dir: Path
) -> None:
    """EACCES here, EAGAIN or ENOMEM on a full machine."""
    path, python = short_dir / "jtop.sock", short_dir / "python"
    python.write_text("not executable")
    monkeypatch.setattr(jtop, "SOCKET", path)
    if find is not None:
        monkeypatch.setattr(jtop, "find", find)
    source = JtopSource(pauses_s=(0.01, 0.01), python=None if find else python)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        async with running(source.run()):
            await until(lambda: source.restarts >= 3)
    assert source.fault is not None
    assert source.fault.kind == "failed"
    (record,) = caplog.records
    assert ("can't start new thread" if find else "Permission denied") in record.message


async def test_the_reader_ends_when_its_stdin_does() -> None:
    """Whatever happens to us, nothing of ours stays behind."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", jtop.READER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 30) in (0, 1)  # 1: it had already found that there is no jtop here


@pytest.mark.full
@pytest.mark.parametrize(
    ("board", "jtop_version", "rail", "temps", "mode"),
    [
        ("agx-orin-64", "7.2.2", "sum of rails", {"cpu", "gpu", "tj", "tboard"}, "MODE_30W"),
        ("agx-orin-64", "4.3.2", "sum of rails", {"cpu", "gpu", "tj", "tboard"}, "MODE_30W"),
        ("orin-nano-8", "7.2.2", "VDD_IN", {"cpu", "gpu", "tj"}, "25W"),
        ("orin-nano-8", "4.3.2", "VDD_IN", {"cpu", "gpu", "tj"}, "25W"),
        ("agx-thor", "7.2.2", "VIN", {"cpu", "gpu", "tj", "soc012"}, "120W"),
    ],
    indirect=["board"],
)
async def test_both_lines_of_jetson_stats_on_three_boards(
    board: FakeBoard, service: JtopService, rail: str, temps: set[str], mode: str
) -> None:
    """FC-62: cv0's sentinel is no temperature; FC-73: watts from mW, in the structured properties."""
    board.set_gpu_process(os.getpid(), "llama-server", 2_000_000)
    source = watched()
    async with running(source.run()):
        for watts, celsius in [(10.0, 50.0), (25.0, 70.0), (45.0, 95.0), (9.0, -5.0)]:
            board.set_total_power(watts)
            board.set_all_temps(celsius)
            board.set_temp("cpu", 45.0)
            await until(lambda w=watts, c=celsius: shows(source, w, max(c, 45.0)))
    sample = source.latest
    zones = {zone.name: zone.temp_c for zone in sample.zones}
    assert temps <= set(zones)
    assert "cv0" not in zones
    assert zones["tj"] == -5.0
    assert (sample.power.rail, sample.power_mode.name) == (rail, mode)
    assert sample.power.parts
    assert sample.emc_clock_hz == board.spec["emc_hz"]["now"]
    assert sample.gpu_used_bytes == 200_000 * 1024
    assert sample.fan.rpm == 1500
    processes = [(p.pid, p.gpu_memory_bytes) for p in sample.gpu_processes]
    # On Thor jtop asks NVML for processes and for the GPU, and there is none here.
    assert processes == ([] if board.name == "agx-thor" else [(os.getpid(), 2_000_000 * 1024)])
    assert bool(sample.gpus) == (board.name != "agx-thor")


@pytest.mark.full
async def test_a_frozen_service_is_named_and_its_reader_replaced(board: FakeBoard, service: JtopService) -> None:
    """start() of the client hangs without limit; the event loop and other sources do not wait for it."""
    source = watched()
    async with running(source.run()):
        await until(lambda: source.latest)
        service.freeze()
        await until(lambda: source.fault and source.fault.kind == "frozen")  # not lost: it holds its socket
        restarts = source.restarts
        await until(lambda: source.restarts > restarts + 1, within_s=120)  # a new client's start() hangs
        assert source.fault is not None and source.fault.kind == "frozen"
        assert len(readers()) <= 1
        service.thaw()
        service.kill()
        service.clean()
        service.start()
        await until(lambda: source.fault is None)
    assert readers() == []


@pytest.mark.full
async def test_a_frozen_reader_is_killed(service: JtopService) -> None:
    source = watched()
    async with running(source.run()):
        await until(lambda: source.latest)
        (reader,) = readers()
        reader.send_signal(signal.SIGSTOP)
        await until(lambda: source.fault and source.fault.kind == "frozen")
        await until(lambda: source.fault is None)
        assert not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE


@pytest.mark.full
async def test_fc65_two_versions_are_named_and_nothing_else_breaks(service: JtopService) -> None:
    """FC-65: client 4.3.2, service 7.2.2."""
    source = watched(python=jtop_python("4.3.2"))
    async with running(source.run()):
        await until(lambda: source.fault and source.fault.kind == "version_mismatch")
    assert source.fault.because == "version mismatch: service 7.2.2, client 4.3.2"


@pytest.mark.full
async def test_a_service_of_another_version_is_read_with_its_own_python(board: FakeBoard, service: JtopService) -> None:
    """7.2.2 is replaced by 4.3.2 while we run: the next reader is run with the interpreter of what runs now."""
    source = watched()
    async with running(source.run()):
        await until(lambda: source.latest)
        service.stop()
        await until(lambda: source.fault)
        older = JtopService(board, jtop_python("4.3.2")).start()
        try:
            await until(lambda: source.fault is None)
            assert readers()[0].cmdline()[0] == str(jtop_python("4.3.2"))
        finally:
            older.stop()


@pytest.mark.full
async def test_the_pace_changes_both_ways(service: JtopService) -> None:
    """5 s without clients, 1 s with one: the service has one interval for all and must be released in between."""
    source = JtopSource(pauses_s=SOON)
    paces: list[list[float]] = []
    async with running(source.run()):
        for interval_s in (5.0, 1.0, 5.0):
            source.set_interval(interval_s)
            await until(lambda w=interval_s: source._interval_s == w and source.latest, within_s=60)
            paces.append([])
            for _ in range(2):
                before = source.latest
                await until(lambda b=before: source.latest is not b, within_s=60)
                paces[-1].append(source.latest.at_s - before.at_s)
    assert source.restarts == 0
    # A busy machine is late with a sample, and the next one is as much too soon; not by the other pace both times.
    assert max(paces[0]) > 4 and min(paces[1]) < 3.5 and max(paces[1]) > 0.7 and max(paces[2]) > 3.5


@pytest.mark.full
async def test_a_share_gives_the_lines_to_a_process_without_the_group(service: JtopService, tmp_path: Path) -> None:
    """edgellm-jtop.service's part and the other end of it, and what the other end sees when the service goes."""
    path = tmp_path / "share.sock"
    share = JtopShare()
    source = watched(share=path)
    share.source._pauses_s = SOON
    async with running(share.serve(bind(path))), running(source.run()):
        await until(lambda: source.latest and source.fault is None)
        assert path.stat().st_mode & 0o777 == 0o660
        service.stop()
        await until(lambda: source.fault and source.fault.kind == "no_socket")
        service.start()
        await until(lambda: source.fault is None)


async def test_a_user_keeps_no_more_than_a_few_connections_to_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the group must not shut the service out."""
    user = 4_000_001
    monkeypatch.setattr(jtop_share, "_uid", lambda _: user)
    share, path = JtopShare(), tmp_path / "share.sock"
    share._broadcast(b"a line")
    monkeypatch.setattr(share.source, "run", asyncio.Event().wait)
    listener = bind(path)
    listener.listen(64)
    async with running(share.serve(listener)):
        lines = [await asyncio.open_unix_connection(str(path)) for _ in range(12)]
        got = [await reader.read(100) for reader, _ in lines]
        assert sorted(got) == [b""] * 4 + [b"a line"] * 8
        user += 1
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert await reader.read(100) == b"a line"
        for each in (writer, *(writer for _, writer in lines)):
            each.close()
        await until(lambda: not +share._users)


def pythons(minor: str) -> list[Path]:
    found = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"))
    return [*found, *Path("/usr/bin").glob(f"python3.{minor}")]


@pytest.mark.full
@pytest.mark.parametrize("minor", ["8", "10", "13"])
async def test_the_reader_runs_on_the_service_s_own_python(board: FakeBoard, jtop_lock: None, minor: str) -> None:
    """JetPack 5 has 3.8, JetPack 6 has 3.10; both ends then run on it."""
    if not pythons(minor):
        pytest.skip(f"no Python 3.{minor} here")
    base = pythons(minor)[0]
    python = jtop_python("7.2.2", base)
    service = JtopService(board, python).start()
    try:
        source = watched()
        async with running(source.run()):
            await until(lambda: source.latest)
            assert readers()[0].cmdline()[0] == str(python)
        assert jtop.find() == python
    finally:
        service.stop()
