"""A child cannot outlive its parent, inherits no descriptors, and is signalled only while its pid is its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.errors import UnavailableError
from edge.linux.procfs import read_usage
from edge.supervisor.process import Child, ProcessLimits, spawn
from tests.serving import ROOT, alive, eventually

PYTHON = (sys.executable, "-S", "-E", "-c")
WAIT = "import time; time.sleep(120)"
TELL = (
    "import json, os, resource, sys; print(json.dumps({'fds': sorted(int(n) for n in os.listdir('/proc/self/fd')),"
    "'env': dict(os.environ), 'argv': sys.argv[1:], 'nice': os.nice(0), 'cpus': sorted(os.sched_getaffinity(0)),"
    "'umask': os.umask(0), 'cwd': os.getcwd(), 'sid': os.getsid(0) == os.getpid(),"
    "'oom': int(open('/proc/self/oom_score_adj').read())}), flush=True); sys.stdin.read()"
)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.send(signal.SIGKILL)
        child.wait(30)
        child.close()


def reported(child: Child) -> dict[str, object]:
    document: dict[str, object] = json.loads(child.stdout.readline())
    return document


def test_it_inherits_nothing_but_what_it_is_given(short_dir: Path, children: list[Child]) -> None:
    cpu = min(os.sched_getaffinity(0))
    with (short_dir / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        child = spawn(
            (*PYTHON, TELL, "--host", "{socket}"), {"LC_ALL": "C"}, short_dir / "m.sock", ProcessLimits(3, cpus=(cpu,))
        )
        children.append(child)
        seen = reported(child)
    assert seen["env"] == {"LC_ALL": "C"} and seen["argv"] == ["--host", str(short_dir / "m.sock")]
    # 0, 1, 2, and the folder that it is just listing.
    assert len(seen["fds"]) == 4 and max(seen["fds"]) == 3  # type: ignore[arg-type, call-overload]
    assert (seen["nice"], seen["cpus"], seen["umask"]) == (min(19, os.nice(0) + 3), [cpu], 0o077)
    assert (seen["cwd"], seen["sid"]) == ("/", True)


def test_only_the_word_of_the_placeholder_becomes_the_socket(short_dir: Path, children: list[Child]) -> None:
    """A folder may have the placeholder as its name, and the embedded engine's fields are one word of JSON."""
    fields = json.dumps({"model.path": "/m/{socket}/x.gguf", "mmproj.path": "{socket}"})
    words = ("--model", "/m/{socket}/x.gguf", "--params", fields, "--host")
    children.append(spawn((*PYTHON, TELL, *words, "{socket}"), {}, short_dir / "m.sock"))
    assert reported(children[0])["argv"] == [*words, str(short_dir / "m.sock")]


def test_the_kernel_takes_it_before_us(short_dir: Path, children: list[Child]) -> None:
    children.append(spawn((*PYTHON, WAIT), {}, short_dir / "m.sock"))
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    children.append(spawn((*PYTHON, WAIT), {}, short_dir / "n.sock", ProcessLimits(oom_score_adj=900)))
    theirs = [int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) for child in children]
    assert theirs == [500, 900] and ours < 500


@pytest.mark.parametrize("argv", [("/nowhere/llama-server",), ("/",)])
def test_what_cannot_be_executed_says_so(argv: tuple[str, ...], short_dir: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        spawn(argv, {}, short_dir / "m.sock")
    assert argv[0] in str(caught.value) and caught.value.hint


def test_a_socket_that_was_left_behind_is_removed(short_dir: Path, children: list[Child]) -> None:
    (short_dir / "m.sock").write_text("of a former child")
    children.append(spawn((*PYTHON, WAIT), {}, short_dir / "m.sock"))
    assert not (short_dir / "m.sock").exists()


def test_a_socket_that_cannot_be_removed_stops_this_model_only(short_dir: Path) -> None:
    """A disk that turned read-only: the OSError ended `up` and all of its models."""
    (short_dir / "m.sock").mkdir()  # unlink(2) refuses it, for root too
    with pytest.raises(UnavailableError, match=r"cannot start .*m\.sock"):
        spawn((*PYTHON, WAIT), {}, short_dir / "m.sock")


def test_a_run_folder_that_was_removed_is_made_again(short_dir: Path, children: list[Child]) -> None:
    """An `rm -r` of the state folder of a running edgellm: the next crash must not be the last start."""
    bind = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1]); print('{}', flush=True); " + WAIT
    children.append(spawn((*PYTHON, bind, "{socket}"), {}, short_dir / "run/main/m.sock"))
    assert reported(children[0]) == {}
    assert (short_dir / "run/main").stat().st_mode & 0o077 == 0


def test_no_folder_is_made_for_an_engine_without_a_socket(short_dir: Path, children: list[Child]) -> None:
    """An rpc-server listens on TCP: its path names no folder that should be there."""
    children.append(spawn((*PYTHON, "pass"), {}, short_dir / "absent" / "m.sock"))
    assert not (short_dir / "absent").exists()


def test_a_process_that_is_not_the_one_we_spawned_is_not_signalled(short_dir: Path, children: list[Child]) -> None:
    """The same pid with another start time is another process."""
    child = spawn((*PYTHON, WAIT), {}, short_dir / "m.sock")
    children.append(child)
    ours, child.started_ticks = child.started_ticks, "1"
    assert not child.send(signal.SIGKILL)
    assert child.poll() is None and alive(child.pid)
    child.started_ticks = ours
    assert child.send(signal.SIGKILL)
    ended = child.wait(30)
    assert ended is not None and ended.signal == signal.SIGKILL and "SIGKILL" in str(ended)
    assert not child.send(signal.SIGKILL), "its pid may belong to another process by now"


def test_an_exit_is_told_with_code_and_time(short_dir: Path, children: list[Child]) -> None:
    children.append(spawn((*PYTHON, "raise SystemExit(7)"), {}, short_dir / "m.sock"))
    ended = children[0].wait(30)
    assert ended is not None and (ended.code, ended.signal) == (7, None)
    assert 0 <= ended.lived_s < 30 and str(ended).startswith("exit code 7 after ")


PARENT = """
import signal, sys, time
from pathlib import Path
from edge.supervisor.process import spawn
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(120)"
child = spawn((sys.executable, "-S", "-E", "-c", stubborn), {}, Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_fc32_it_does_not_outlive_us(number: signal.Signals, short_dir: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(short_dir / "m.sock")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(number)
    parent.wait(30)
    parent.stdout.close()
    eventually(lambda: not alive(child), "it dies with its parent")


def test_usage_is_of_the_child(short_dir: Path, children: list[Child]) -> None:
    work = "data = b'x' * (64 << 20); sum(range(3_000_000)); print(len(data), flush=True); import time; time.sleep(120)"
    child = spawn((*PYTHON, work), {}, short_dir / "m.sock")
    children.append(child)
    child.stdout.readline()
    seen = read_usage(child.pid)
    assert seen is not None
    assert seen.rss_anon_bytes > 64 << 20 and seen.cpu_s > 0 and seen.read_bytes > 0
    assert read_usage(2**22 + 1) is None


def test_a_log_that_fills_the_pipe_waits_for_nobody_while_we_import(short_dir: Path, children: list[Child]) -> None:
    """A whole start's log fits into the pipe: the child never blocks on its parent."""
    talk = (
        "import sys, time; sys.stderr.write(('x' * 199 + chr(10)) * 4000); print('done', flush=True); time.sleep(120)"
    )
    child = spawn((*PYTHON, talk), {}, short_dir / "m.sock")
    children.append(child)
    began = time.monotonic()
    assert child.stdout.readline() == b"done\n"
    assert time.monotonic() - began < 30


LLAMA_SERVER = (
    "import signal, sys, threading\n"
    "done = threading.Event()\n"
    "signal.signal(signal.SIGTERM, lambda *_: done.set())\n"
    "print('up', flush=True)\n"
    "done.wait()\n"
    "sys.exit(0 if 'cmd_router_to_child:exit' in sys.stdin.readline() else 1)\n"
)


def test_a_server_that_reads_commands_is_ended_by_one_after_sigterm(short_dir: Path, children: list[Child]) -> None:
    """llama-server with its progress protocol joins the reader of its stdin, which that line alone ends."""
    environment = {"PATH": "/usr/bin:/bin", "LLAMA_SERVER_ROUTER_PORT": "1"}
    child = spawn((*PYTHON, LLAMA_SERVER), environment, short_dir / "m.sock")
    children.append(child)
    assert child.stdout.readline() == b"up\n"
    assert child.send(signal.SIGTERM)
    ended = child.wait(60)
    assert ended is not None
    assert (ended.code, ended.signal) == (0, None)
