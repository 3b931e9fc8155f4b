"""Output that cannot be written ends nothing: full, closed, unread or encoded for another alphabet."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSCTTY
from typing import IO, Any

import httpx
import pytest

from tests.fakes import llama_switches
from tests.needs import compiler
from tests.serving import PATIENCE_S, alive, edgellm, environment, eventually, free_port

Process = subprocess.Popen[bytes]
HANGING_OPEN = Path(__file__).parents[1] / "fakes" / "hanging_open.c"


@contextmanager
def up(
    folder: Path, model: Path, stdout: int | IO[bytes] | None, **more: Any
) -> Iterator[tuple[Process, Callable[[], str | None]]]:
    """Start `edgellm up` by hand over the fake engine; yield it and a function that asks for its status."""
    fake, port = folder / "fake", free_port()
    fake.mkdir()
    config = folder / "s" / "config" / "edgellm.toml"
    config.parent.mkdir(parents=True)
    config.write_text('schema = 1\nprofile = "cpu"\n[restart]\nbackoff_s = [0.1]\n')
    binary = llama_switches.write_fake(fake, kv_mib=400.0)
    command = [
        *more.pop("prefix", ()),
        sys.executable,
        "-m",
        "edge",
        "up",
        "--state-dir",
        str(folder / "s"),
        "--engine",
        str(binary),
    ]
    command += ["-m", str(model), "--listen", f"127.0.0.1:{port}"]
    env = {**environment(), **more.pop("env", {})}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, env=env, cwd=folder, **more)

    def status() -> str | None:
        try:
            return str(httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=10, verify=False).json()["status"])
        except (httpx.HTTPError, ValueError):
            return None

    try:
        yield process, status
    finally:
        process.kill()
        process.wait()


def assert_serves_through_a_crash(folder: Path, process: Process, status: Callable[[], str | None]) -> None:
    """READY, then again after the engine was killed, then an ordinary stop with exit code 0."""
    eventually(lambda: status() in ("ok", "degraded"), lambda: f"not ready: {process.poll()}")
    (pid,) = llama_switches.starts(folder / "fake")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: len(llama_switches.starts(folder / "fake")) == 2, lambda: f"no second start: {process.poll()}")
    eventually(lambda: status() in ("ok", "degraded"), lambda: f"not ready again: {process.poll()}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_a_file_of_the_kernel_that_does_not_return_is_named(short_dir: Path, smollm2: Path) -> None:
    """A driver may hang behind any file of /sys: `up` must not look dead meanwhile, and goes on when it returns."""
    cc = compiler("opens cannot be held up")
    library, hang, output = short_dir / "hang.so", short_dir / "hang", short_dir / "output"
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, HANGING_OPEN, "-ldl"], check=True)
    hang.touch()
    env = {"LD_PRELOAD": str(library), "HANG_PATH": "/proc/cpuinfo", "HANG_FILE": str(hang)}
    with output.open("wb") as file, up(short_dir, smollm2, file, stderr=file, env=env) as (process, status):
        said = "a read of /proc/cpuinfo has not returned"
        eventually(lambda: said in output.read_text(), lambda: f"not named: {process.poll()} {output.read_text()}")
        hang.unlink()
        eventually(lambda: status() in ("ok", "degraded"), lambda: f"not ready: {process.poll()}")


def test_a_full_disk_ends_nothing(short_dir: Path, smollm2: Path) -> None:
    with Path("/dev/full").open("wb") as full, up(short_dir, smollm2, full, stderr=full) as (process, status):
        assert_serves_through_a_crash(short_dir, process, status)


def test_a_reader_that_left_ends_nothing(short_dir: Path, smollm2: Path) -> None:
    reader, writer = os.pipe()
    with up(short_dir, smollm2, writer, stderr=writer) as (process, status):
        os.close(writer)
        os.close(reader)
        assert_serves_through_a_crash(short_dir, process, status)


def test_a_reader_that_never_reads_ends_nothing(short_dir: Path, smollm2: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with up(short_dir, smollm2, writer) as (process, status):
        assert_serves_through_a_crash(short_dir, process, status)
    os.close(reader)
    os.close(writer)


def close_all() -> None:
    for number in (0, 1, 2):
        os.close(number)


def test_closed_streams_end_nothing(short_dir: Path, smollm2: Path) -> None:
    with up(short_dir, smollm2, None, preexec_fn=close_all) as (process, status):
        assert_serves_through_a_crash(short_dir, process, status)


@pytest.mark.parametrize("encoding", ["gbk", "iso-8859-1", "ascii"])
def test_an_encoding_without_our_characters_ends_nothing(short_dir: Path, smollm2: Path, encoding: str) -> None:
    log = short_dir / "log"
    with log.open("wb") as out, up(short_dir, smollm2, out, env={"PYTHONIOENCODING": encoding}) as (process, status):
        assert_serves_through_a_crash(short_dir, process, status)
    assert b"? warm" in log.read_bytes().replace("·".encode("gbk"), b"?"), log.read_bytes()


def test_variables_of_a_kubernetes_service_are_mentioned_once_and_change_nothing(
    short_dir: Path, smollm2: Path
) -> None:
    """A Service named edgellm, and a Docker link to a container of that name."""
    foreign = {
        "EDGELLM_PORT": "tcp://10.0.0.1:8080",
        "EDGELLM_SERVICE_HOST": "10.0.0.1",
        "EDGELLM_NAME": "/web/edgellm",
    }
    log = short_dir / "log"
    with log.open("wb") as out, up(short_dir, smollm2, out, stderr=out, env=foreign) as (process, status):
        assert_serves_through_a_crash(short_dir, process, status)
    mentioned = [line for line in log.read_text().splitlines() if "EDGELLM_SERVICE_HOST" in line]
    assert len(mentioned) == 1 and "Kubernetes or Docker" in mentioned[0], log.read_text()
    assert all(name in mentioned[0] for name in foreign)


def run(arguments: list[str], **streams: Any) -> Process:
    command = [sys.executable, "-m", "edge", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment(), **streams)


@pytest.mark.parametrize("arguments", [["profile", "list"], ["board"], ["plan", "--help"], ["up", "--help"]])
def test_a_command_whose_output_is_lost_does_not_exit_with_0(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        lost = run(arguments, stdout=full, stderr=subprocess.PIPE)
    assert b"No space left on device" in lost.communicate(timeout=PATIENCE_S)[1] and lost.returncode == 74
    reader, writer = os.pipe()
    os.close(reader)
    cut = run(arguments, stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    assert cut.wait(PATIENCE_S) in (1, 141)  # click's own answer to EPIPE, or 128 + SIGPIPE


def test_each_command_writes_as_best_it_can(short_dir: Path, smollm2: Path) -> None:
    """Beside a server: another alphabet and closed streams change no exit code, lost output is no success."""
    state = ("--state-dir", str(short_dir / "s"))
    plan = ("plan", "-p", "cpu", "-m", str(smollm2), "--engine", str(short_dir / "fake" / "llama-server"))
    with up(short_dir, smollm2, subprocess.DEVNULL) as (process, status):
        eventually(lambda: status() in ("ok", "degraded"), lambda: f"not ready: {process.poll()}")
        for command in (("status",), ("top", "--once"), ("ps",), ("timeline",), ("logs",), ("doctor", "--quick"), plan):
            usual = edgellm(*command, *state)
            assert usual.returncode in (0, 1) and usual.stdout, usual.stderr
            for encoding in ("gbk", "iso-8859-1"):
                env = {**environment(), "PYTHONIOENCODING": encoding}
                words = [sys.executable, "-m", "edge", *command, *state]
                other = subprocess.run(words, env=env, capture_output=True, timeout=PATIENCE_S, check=False)
                assert (other.returncode, b"Traceback" in other.stderr) == (usual.returncode, False), command
            with Path("/dev/full").open("wb") as full:
                lost = run([*command, *state], stdout=full, stderr=subprocess.PIPE)
            assert b"Traceback" not in lost.communicate(timeout=PATIENCE_S)[1] and lost.returncode in (
                usual.returncode or 74,
                74,
            ), command
            reader, writer = os.pipe()
            os.close(reader)
            cut = run([*command, *state], stdout=writer, stderr=subprocess.DEVNULL)
            os.close(writer)
            assert cut.wait(PATIENCE_S) in (1, 141), command
            words = [sys.executable, "-m", "edge", *command, *state]
            closed = subprocess.Popen(words, env=environment(), preexec_fn=close_all)
            assert closed.wait(PATIENCE_S) == usual.returncode, command
        assert status() in ("ok", "degraded")


@contextmanager
def in_a_terminal(folder: Path, model: Path, *prefix: str) -> Iterator[tuple[Process, Callable[[], str | None], int]]:
    """`up` as an interactive shell starts it: foreground of a session with a controlling terminal; its other end."""
    ours, its = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        ioctl(its, TIOCSCTTY, 0)

    with up(folder, model, its, prefix=prefix, stderr=its, preexec_fn=take_terminal) as (process, status):
        os.close(its)
        eventually(lambda: status() in ("ok", "degraded"), lambda: f"not ready: {process.poll()}")
        try:
            yield process, status, ours
        finally:
            with suppress(OSError):
                os.close(ours)


def test_a_hangup_of_the_terminal_stops_in_order(short_dir: Path, smollm2: Path) -> None:
    with in_a_terminal(short_dir, smollm2) as (process, _, ours):
        os.close(ours)
        assert process.wait(PATIENCE_S) == 129
        (pid,) = llama_switches.starts(short_dir / "fake")
        assert not alive(pid)


def test_a_sighup_with_the_terminal_still_there_reloads(short_dir: Path, smollm2: Path) -> None:
    with in_a_terminal(short_dir, smollm2) as (process, status, ours):
        process.send_signal(signal.SIGHUP)
        text = b""

        def reloaded() -> bool:
            nonlocal text
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 4096)
            return b"reloaded: " in text

        eventually(reloaded, lambda: text.decode(errors="replace"))
        assert status() in ("ok", "degraded") and process.poll() is None


def test_a_terminal_with_tostop_does_not_stop_a_job_in_the_background(short_dir: Path, smollm2: Path) -> None:
    """termios(3): with TOSTOP a write of a background process is answered with SIGTTOU, which stops it."""
    shell = ("sh", "-c", 'set -m; stty -F /dev/tty tostop; "$@" & wait', "sh")
    with in_a_terminal(short_dir, smollm2, *shell) as (shell_process, status, _):
        (pid,) = llama_switches.starts(short_dir / "fake")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(llama_switches.starts(short_dir / "fake")) == 2, "no second start")
        eventually(lambda: status() in ("ok", "degraded"), "not ready again")
        assert edgellm("stop", "--state-dir", str(short_dir / "s")).returncode == 0
        assert shell_process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("prefix", [("nohup",), ("setsid", "--wait")])
def test_under_nohup_or_setsid_it_serves_on_without_its_terminal(
    short_dir: Path, smollm2: Path, prefix: tuple[str, ...]
) -> None:
    """The engine's next crash, whose lines have nowhere to go, ends nothing either."""
    with in_a_terminal(short_dir, smollm2, *prefix) as (process, status, ours):
        os.close(ours)
        (pid,) = llama_switches.starts(short_dir / "fake")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: len(llama_switches.starts(short_dir / "fake")) == 2, lambda: f"{process.poll()}")
        eventually(lambda: status() in ("ok", "degraded"), lambda: f"not ready again: {process.poll()}")
        assert edgellm("stop", "--state-dir", str(short_dir / "s")).returncode == 0
        eventually(lambda: status() is None, "it still answers")
