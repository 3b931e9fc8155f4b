"""Nothing of an engine stays behind a real shell script: at a stop, a crash, and when the parent is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.linux import control_group
from edge.linux.control_group import ControlGroup
from edge.linux.procfs import read_stat, session_pids
from edge.supervisor.oom import OomWitness
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.process import spawn
from edge.supervisor.status import State
from tests.fakes import llama_switches
from tests.supervisor.rig import ENV, FAST, Rig, rigged

# A script that starts the engine and waits for it, as vendors' wrappers do; the last passes no signal on.
PLAIN = '"$@"\nexit $?\n'
BACKGROUND = '"$@" &\nwait $!\n'
DEAF = 'trap "" TERM\n"$@" &\nwait\nwait\n'
# The engine begins a session of its own: no session of ours leads to it.
DAEMON = 'setsid "$@" </dev/null &\nwait $!\n'
DETACHED = '"$@" </dev/null &\nsleep 0.2\nexit 0\n'


def script(folder: Path, body: str, **switches: object) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "engine.sh"
    # Without this variable the engine does not end with its standard input.
    path.write_text(f"#!/bin/sh\nunset LLAMA_SERVER_ROUTER_PORT\n{body}")
    path.chmod(0o755)
    return (str(path), *llama_switches.argv(folder / "fake", **switches))


def gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.state == "Z"


@pytest.mark.parametrize("body", [PLAIN, BACKGROUND, DEAF], ids=["plain", "background", "deaf"])
async def test_an_engine_behind_a_script_is_gone_after_a_stop(short_dir: Path, body: str) -> None:
    async with rigged(short_dir, argv=script(short_dir, body)) as rig:
        await rig.ready()
        (engine,) = rig.pids
        rig.supervisor.stop()
        await rig.settle(State.STOPPED)
        assert gone(engine)
        assert rig.supervisor.watch is not None and not session_pids(rig.supervisor.watch.child.pid)


async def test_an_engine_whose_script_is_killed_leaves_no_server_behind(short_dir: Path) -> None:
    """300 MB stayed at every restart."""
    async with rigged(short_dir, argv=script(short_dir, BACKGROUND)) as rig:
        await rig.ready()
        assert rig.supervisor.watch is not None
        os.kill(rig.supervisor.watch.child.pid, signal.SIGKILL)
        await rig.until(lambda: len(rig.pids) == 2)
        await rig.ready()
        first, second = rig.pids
        assert gone(first) and not gone(second)


async def test_a_script_that_detaches_its_engine_is_no_start(short_dir: Path) -> None:
    async with rigged(short_dir, argv=script(short_dir, DETACHED, load_s=60.0)) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        assert all(gone(pid) for pid in rig.pids)


async def test_an_engine_that_exits_with_64_is_failed_at_once(short_dir: Path) -> None:
    """EX_USAGE of sysexits.h, without a word: the same command line would be refused again."""
    body = 'echo start >>"$0.starts"\nexit 64\n'
    async with rigged(short_dir, argv=script(short_dir, body)) as rig:
        assert await rig.settle(State.FAILED, State.READY) is State.FAILED
        failure = rig.supervisor.machine.failure
        assert failure is not None and failure.kind == "bad_flag" and "exit code 64" in failure.evidence
        assert (short_dir / "engine.sh.starts").read_text() == "start\n"


async def test_a_shells_137_and_139_are_the_signals_of_its_engine(short_dir: Path) -> None:
    async with rigged(short_dir, argv=script(short_dir, PLAIN), rungs=2) as rig:
        await rig.ready()
        for restarts, number in enumerate((signal.SIGSEGV, signal.SIGKILL), 1):
            os.kill(rig.pids[-1], number)
            await rig.until(lambda expected=restarts: rig.supervisor.restarts == expected)
            await rig.ready()
        assert rig.kinds == ["signal_segv", "killed"]
        assert rig.supervisor.machine.rung == 0


async def test_the_work_of_an_engine_behind_a_script_is_its_life(short_dir: Path) -> None:
    """The script itself uses no CPU time, and its engine prints nothing for longer than the limit."""
    burn = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    body = f'"{sys.executable}" -S -c "{burn}"\n{PLAIN}'
    terms = SupervisorOptions(policy=replace(FAST, stall_s=1.0))
    async with rigged(short_dir, argv=script(short_dir, body), terms=terms) as rig:
        await rig.ready()
        assert len(rig.pids) == 1 and not rig.kinds


PARENT = """
import sys, time
from pathlib import Path
from edge.supervisor.process import spawn
child = spawn(sys.argv[2:], {env!r}, Path(sys.argv[1]))
deadline = time.monotonic() + 20
while not Path(sys.argv[1]).exists() and time.monotonic() < deadline:
    time.sleep(0.01)
child.guard()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_an_engine_behind_a_script_dies_with_its_supervisor(short_dir: Path) -> None:
    """kill -9 of the parent: the parent-death signal reaches the script only.

    The engine prints nothing, or it would end by itself at the first line that nothing reads any more.
    """
    command = [sys.executable, "-c", PARENT.format(env=dict(ENV)), str(short_dir / "m.sock")]
    command += script(short_dir, BACKGROUND, log_era="silent")
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    session = int(parent.stdout.readline())
    engines = llama_switches.starts(short_dir / "fake")
    assert engines and not gone(engines[0])
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while session_pids(session) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not session_pids(session) and gone(engines[0])


def test_a_child_without_children_has_no_guard(short_dir: Path) -> None:
    child = spawn((sys.executable, "-S", "-c", "import time; time.sleep(60)"), dict(ENV), short_dir / "m.sock")
    child.guard()
    assert child._guard is None
    child.send(signal.SIGKILL)
    child.wait(20)
    child.close()


async def test_a_socket_that_another_process_answers_is_refused(short_dir: Path) -> None:
    """An engine of a former start that binds the socket after the new one."""
    quiet = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    async with rigged(short_dir, argv=quiet) as rig:
        await rig.until(lambda: rig.supervisor.watch is not None)
        command = [part.replace("{socket}", str(rig.socket_path)) for part in llama_switches.argv(short_dir / "other")]
        stranger = await asyncio.create_subprocess_exec(*command, env=ENV, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)
        try:
            await rig.until(lambda: "socket_busy" in rig.kinds)
            assert "READY" not in rig.states
        finally:
            stranger.kill()
            await stranger.wait()


# A program beside the engine that ignores SIGTERM in a session of its own; the second is orphaned at once.
HELPER = f'''"{sys.executable}" -S -c "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)
open('$FOLDER/helper', 'w').write(str(os.getpid()))
time.sleep(300)" </dev/null >/dev/null 2>&1 &'''
BEYOND = {
    "pipeline": '"$@" 2>&1 | cat >&2\n',
    "timeout": 'timeout 1000 "$@"\n',
    "no environment": 'env -i PATH=/usr/bin:/bin LC_ALL=C "$@" &\nwait $!\n',
    "session": 'nice -n 1 setsid "$@" </dev/null &\nwait\n',
    "session of a session": 'setsid sh -c \'setsid "$@" </dev/null & wait $!\' sh "$@" </dev/null &\nwait $!\n',
    "helper": f'setsid {HELPER}\n"$@"\n',
    "orphaned helper": f'(setsid {HELPER})\n"$@"\n',
}


def beyond(folder: Path, name: str) -> tuple[str, ...]:
    return script(folder, f"FOLDER={folder}\n{BEYOND[name]}")


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def everything_of(rig: Rig, folder: Path) -> list[int]:
    helper = written(folder / "helper")
    return [*rig.pids, *([int(helper)] if helper else [])]


@pytest.mark.parametrize("name", list(BEYOND))
async def test_what_left_the_session_without_a_control_group_is_gone_after_a_stop(short_dir: Path, name: str) -> None:
    async with rigged(short_dir, argv=beyond(short_dir, name)) as rig:
        await rig.ready()
        await rig.until(lambda: "helper" not in name or written(short_dir / "helper"))
        rig.supervisor.stop()
        await rig.settle(State.STOPPED)
        assert all(gone(pid) for pid in everything_of(rig, short_dir))


@pytest.mark.parametrize("name", list(BEYOND))
async def test_what_left_the_session_without_a_control_group_ends_with_its_script(short_dir: Path, name: str) -> None:
    async with rigged(short_dir, argv=beyond(short_dir, name)) as rig:
        await rig.ready()
        await rig.until(lambda: "helper" not in name or written(short_dir / "helper"))
        first = everything_of(rig, short_dir)
        assert rig.supervisor.watch is not None
        rig.supervisor.watch.child.guard()  # as at each look at the engine, and at its readiness
        os.kill(rig.supervisor.watch.child.pid, signal.SIGKILL)
        await rig.until(lambda: len(rig.pids) == 2)
        await rig.ready()
        assert all(gone(pid) for pid in first)


@pytest.mark.parametrize("body", [DAEMON, BEYOND["session of a session"]], ids=["session", "session of a session"])
def test_what_left_the_session_without_a_control_group_dies_with_its_supervisor(short_dir: Path, body: str) -> None:
    command = [sys.executable, "-c", PARENT.format(env=dict(ENV)), str(short_dir / "m.sock")]
    command += script(short_dir, body, log_era="silent")
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    int(parent.stdout.readline())
    (engine,) = llama_switches.starts(short_dir / "fake")
    assert not gone(engine)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while not gone(engine) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(engine)


@pytest.fixture
def delegated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real group of cgroup v2 in place of the one that systemd delegates; children get theirs below it."""
    root = next((mount for mount in control_group.MOUNTS if (mount / "cgroup.procs").exists()), None)
    if root is None or os.geteuid() or not os.access(root, os.W_OK):
        pytest.skip("needs root and a cgroup v2 that can be written")
    folder = root / f"edgellm-test-{os.getpid()}"
    folder.mkdir()
    monkeypatch.setattr(control_group, "delegated", lambda *_: folder)
    yield folder
    left = [path for path in folder.iterdir() if path.is_dir()]
    for path in left:
        (path / "cgroup.kill").write_text("1")
        assert ControlGroup(path).remove(20)
    folder.rmdir()
    assert not left, "a group stayed"


async def test_an_engine_with_a_session_of_its_own_is_gone_after_a_stop(short_dir: Path, delegated: Path) -> None:
    async with rigged(short_dir, argv=script(short_dir, DAEMON)) as rig:
        await rig.ready()
        (engine,) = rig.pids
        stat = read_stat(engine)
        assert stat is not None and stat.session == engine
        rig.supervisor.stop()
        await rig.settle(State.STOPPED)
        assert gone(engine)


async def test_an_engine_with_a_session_of_its_own_ends_with_its_script(short_dir: Path, delegated: Path) -> None:
    async with rigged(short_dir, argv=script(short_dir, DAEMON)) as rig:
        await rig.ready()
        assert rig.supervisor.watch is not None
        os.kill(rig.supervisor.watch.child.pid, signal.SIGKILL)
        await rig.until(lambda: len(rig.pids) == 2)
        await rig.ready()
        first, second = rig.pids
        assert gone(first) and not gone(second)


def test_an_engine_with_a_session_of_its_own_dies_with_its_supervisor(short_dir: Path, delegated: Path) -> None:
    put = f"from edge.linux import control_group\ncontrol_group.delegated = lambda *_: Path({str(delegated)!r})\n"
    program = PARENT.format(env=dict(ENV)).replace("child = spawn", put + "child = spawn")
    command = [sys.executable, "-c", program, str(short_dir / "m.sock"), *script(short_dir, DAEMON, log_era="silent")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    int(parent.stdout.readline())
    (engine,) = llama_switches.starts(short_dir / "fake")
    assert not gone(engine)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while any(path.is_dir() for path in delegated.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(engine)


def test_the_kernels_kills_are_counted_above_the_engines_group(tmp_path: Path) -> None:
    """Our group for the engine has no memory controller, and so no memory.events."""
    proc, unit = tmp_path / "proc/7", tmp_path / "cgroup/unit"
    proc.mkdir(parents=True)
    unit.mkdir(parents=True)
    (proc / "cgroup").write_text(f"0::/unit/{control_group.PREFIX}5-1\n")
    (unit / "memory.events").write_text("oom_kill 0\n")
    witness = OomWitness(7, 0.0, proc=tmp_path / "proc", cgroup_root=tmp_path / "cgroup", kmsg=tmp_path / "none")
    assert not witness.killed()
    (unit / "memory.events").write_text("oom_kill 1\n")
    assert witness.killed()
