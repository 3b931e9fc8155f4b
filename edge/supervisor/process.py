"""One engine process: it cannot outlive this process, and a signal reaches only the process that was spawned.

Standard library only and synchronous: the first child is spawned before asyncio is imported. Call `spawn` on the main
thread: the parent-death signal fires when the spawning *thread* ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from edge.errors import UnavailableError
from edge.linux import control_group, procfs
from edge.linux.control_group import ControlGroup
from edge.linux.files import private_dir
from edge.linux.slow_reads import ReadHangs, answer_of


class ProcessLimits(NamedTuple):
    """Limits that keep an engine from starving the rest of the machine. `cpus` empty: those of this process."""

    nice: int = 0
    # proc(5): -1000…1000 is added to the badness. 500 makes the kernel choose the engine, which is restarted, before
    # sshd or this process.
    oom_score_adj: int = 500
    cpus: tuple[int, ...] = ()


class ExitStatus(NamedTuple):
    """An exit by `code` or by `signal`. `lived_s`: from spawn to exit."""

    code: int | None
    signal: int | None
    lived_s: float

    def of_engine(self) -> ExitStatus:
        """Return the engine's status where a shell reports it: 128 + n is the end of its command by signal n."""
        if self.code is None or not 128 < self.code <= 128 + signal.NSIG:
            return self
        return ExitStatus(None, self.code - 128, self.lived_s)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code} after {self.lived_s:.1f} s"
        known = self.signal in {number.value for number in signal.Signals}
        name = signal.Signals(self.signal).name if known else str(self.signal)
        return f"signal {name} after {self.lived_s:.1f} s"


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PROTOCOL_VARIABLE = "LLAMA_SERVER_ROUTER_PORT"
EXIT_COMMAND = b"cmd_router_to_child:exit\n"  # CMD_ROUTER_TO_CHILD_EXIT of server-models.cpp
# The whole log of a start fits, so the child never blocks on it while this process still imports. 1 MiB is
# the kernel's default limit for unprivileged processes (/proc/sys/fs/pipe-max-size).
PIPE_BYTES = 1 << 20
SESSION_LOOK_S = 0.02
# $0: the process group; $1: the folder of the control group, or empty; then PID:TICKS of processes outside of the
# group, ended if they are still those (field 22 of stat). Kernels before 5.14 have no cgroup.kill. dash takes the `--`
# of `kill -9 --` for a process id.
GUARD = """read _
if [ -n "$1" ]; then
    (echo 1 >"$1/cgroup.kill") 2>/dev/null || kill -9 $(grep -vx 0 "$1/cgroup.procs")
fi
kill -s KILL -- "-$0"
folder=$1
shift
for each in "$@"; do
    stat=$(cat "/proc/${each%:*}/stat" 2>/dev/null) && set -- ${stat##*) } || continue
    [ "${20}" = "${each#*:}" ] && kill -9 "${each%:*}"
done
set -- "$folder"
n=0  # the killed take a moment to end
while [ -n "$1" ] && ! rmdir "$1" 2>/dev/null && [ $n -lt 50 ]; do n=$((n + 1)); sleep 0.1; done
"""
FOLDER_S = 1.0  # a flash card makes a folder within a fraction of it; the event loop waits meanwhile
KILLED_S = 5.0  # from SIGKILL to the end: a CUDA context of some GiB takes the driver a second or two


class Child:
    """A spawned engine. `close()` closes the pipes."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        socket_path: Path,
        spawned_at_s: float,
        group: ControlGroup | None = None,
        *,
        reads_commands: bool = False,
    ) -> None:
        """`reads_commands`: it is a llama-server with the progress protocol, which reads its stdin."""
        self.pid = process.pid
        self.socket_path = socket_path
        self.spawned_at_s = spawned_at_s  # time.monotonic()
        self.started_ticks = _start_ticks(process.pid)
        self.group = group  # None: not delegated to us
        self._process = process
        self._reads_commands = reads_commands
        self._guard: subprocess.Popen[bytes] | None = None
        self._strays: dict[int, int] = {}  # descendants in sessions of their own: pid to start time in ticks
        assert process.stdout is not None and process.stderr is not None
        self.stdout = process.stdout
        self.stderr = process.stderr

    def drop_guard(self) -> None:
        """End the guard. Before the child is reaped: afterwards its id may belong to another process group."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.communicate()

    def poll(self) -> ExitStatus | None:
        """Return how the child ended, reaping it; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        lived_s = time.monotonic() - self.spawned_at_s
        return ExitStatus(code if code >= 0 else None, -code if code < 0 else None, lived_s)

    def send(self, number: signal.Signals) -> bool:
        """Signal the child's process group, unless the pid is another process's by now. Return whether it was sent.

        The group: an engine behind a shell script is a child of the script, which may not pass signals on.
        """
        if self._process.returncode is not None or _start_ticks(self.pid) != self.started_ticks:
            return False
        self._look_for_strays()
        for stray in self._living_strays():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            if number == signal.SIGTERM and self._reads_commands and self._process.stdin is not None:
                # After SIGTERM such a server still joins the thread that waits for this line (server.cpp, `setup`).
                with contextlib.suppress(OSError, ValueError):
                    self._process.stdin.write(EXIT_COMMAND)
            return True
        return False

    def guard(self) -> None:
        """Have the child's process and control group killed if this process dies, once the child has children.

        The parent-death signal reaches the child only, which for a script is not the engine. A shell waits for the end
        of a pipe from this process.
        """
        if self._process.returncode is not None or not self._has_children():
            return
        known = dict(self._strays)
        self._look_for_strays()
        if self._guard is not None and known != self._strays:
            self.drop_guard()
        if self._guard is None:
            folder = str(self.group.folder) if self.group is not None else ""
            strays = [f"{pid}:{ticks}" for pid, ticks in self._strays.items()]
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, str(self.pid), folder, *strays],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def end_rest(self, grace_s: float = 0.0) -> int:
        """Kill what the reaped child left in its session and control group, after `grace_s` for it to end.

        Blocking; return how many. A process that began a session of its own is found by the group; without one, only if
        it was a descendant when it was last looked for.
        """
        end_s = time.monotonic() + grace_s
        while (left := self._rest()) and time.monotonic() < end_s:
            time.sleep(SESSION_LOOK_S)
        if left and self.group is not None:
            self.group.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        end_s = time.monotonic() + KILLED_S
        while left and self._rest() and time.monotonic() < end_s:
            time.sleep(SESSION_LOOK_S)
        if self.group is not None:
            self.group.remove()
        return len(left)

    def _rest(self) -> list[int]:
        """Return the processes of the session and of the control group.

        While a process of the session lives, the kernel gives its id to no other process; one that has the id is new.
        """
        pids = set(self.group.pids() if self.group is not None else ()).union(self._living_strays())
        return sorted(pids.union(procfs.session_pids(self.pid) if procfs.read_stat(self.pid) is None else ()))

    def _look_for_strays(self) -> None:
        """Note the descendants that are in sessions of their own. Their start times tell them from later processes."""
        if self.group is not None:
            return
        living = {pid: self._strays[pid] for pid in self._living_strays()}
        family = procfs.family_pids(self.pid)
        for pid in family[1:]:
            stat = procfs.read_stat(pid)
            # Its parent is looked at again: the id may have gone to another process meanwhile.
            if stat is not None and stat.session != self.pid and stat.parent_pid in family:
                living[pid] = stat.started_ticks
        self._strays = living

    def _living_strays(self) -> list[int]:
        return [pid for pid, ticks in self._strays.items() if _start_ticks(pid) == ticks and _runs(pid)]

    def _has_children(self) -> bool:
        grouped = self.group is not None and any(pid != self.pid for pid in self.group.pids())
        return grouped or bool(procfs.child_pids(self.pid))

    def owns(self, pid: int) -> bool:
        """Return whether a process is the child, a descendant, or of its session or control group.

        0 is a process of another pid namespace: unknown.
        """
        stat = procfs.read_stat(pid) if pid else None
        if pid in (0, self.pid) or stat is None or stat.session == self.pid:
            return True
        if self.group is not None and pid in self.group.pids():
            return True
        return pid in procfs.family_pids(self.pid)

    def wait(self, timeout_s: float) -> ExitStatus | None:
        """Wait for the end, blocking; for the synchronous launcher only."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll()

    def close(self) -> None:
        self.drop_guard()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self.group is not None:
            self.group.remove()


def spawn(argv: Sequence[str], env: Mapping[str, str], socket_path: Path, limits: ProcessLimits | None = None) -> Child:
    """Start an engine. The word `{socket}` of argv becomes its socket.

    Raises UnavailableError if the binary cannot be executed, or a former child's socket cannot be removed.
    """
    limits = limits or ProcessLimits()
    if "{socket}" in argv:
        with contextlib.suppress(OSError):  # removed under a running process: each start would fail until the last one
            private_dir(socket_path.parent)
    try:
        socket_path.unlink(missing_ok=True)  # a former child's: the instance lock excludes other owners
    except OSError as error:  # a disk that turned read-only: this model does not start, the others serve on
        raise UnavailableError(f"cannot start {argv[0]}: {error}", "see `dmesg` for errors of the disk") from error
    spawned_at_s = time.monotonic()
    group = control_group.create()
    entry = _open_entry(group)
    try:
        process = subprocess.Popen(
            # Whole words only: a path of a model may hold the placeholder's text too.
            [str(socket_path) if word == "{socket}" else word for word in with_slot_folder(argv)],
            env=dict(env),
            stdin=subprocess.PIPE,  # held open: EOF is the child's sign that this process is gone
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal goes to this process only
            umask=0o077,
            preexec_fn=_BeforeExec(os.getpid(), limits, entry),
        )
    except (OSError, subprocess.SubprocessError) as error:
        if group is not None:
            group.remove()
        raise UnavailableError(f"cannot start {argv[0]}: {error}", "check the path and its permissions") from error
    finally:
        if entry is not None:
            os.close(entry)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        with contextlib.suppress(OSError):
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(limits.oom_score_adj))
    return Child(process, socket_path, spawned_at_s, group, reads_commands=PROTOCOL_VARIABLE in env)


def _open_entry(group: ControlGroup | None) -> int | None:
    with contextlib.suppress(OSError):
        return group.open_procs() if group is not None else None
    return None


SLOT_FOLDER = "--slot-save-path"


def with_slot_folder(argv: Sequence[str]) -> list[str]:
    """Create the folder of --slot-save-path, which llama-server needs to start; leave the option out if that fails."""
    words = list(argv)
    if SLOT_FOLDER in words[:-1]:
        place = words.index(SLOT_FOLDER)
        try:
            answer_of(partial(private_dir, Path(words[place + 1])), FOLDER_S, FOLDER_S)
        except (OSError, ReadHangs):  # prompts are computed anew, which is no reason not to serve
            del words[place : place + 2]
    return words


_libc = ctypes.CDLL(None)  # loaded before any fork: between fork and exec nothing may be allocated


class _BeforeExec:
    """Set up the child between fork and exec."""

    def __init__(self, parent: int, limits: ProcessLimits, group: int | None) -> None:
        self.parent = parent
        self.limits = limits
        self.group = group  # descriptor of its cgroup.procs

    def __call__(self) -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it orphans stays its descendant, and is found at its end
        if os.getppid() != self.parent:  # the parent died before the call
            os._exit(1)
        if self.group is not None:
            with contextlib.suppress(OSError):  # without it the engine still has its session
                os.write(self.group, b"0")  # before exec, so that nothing it forks is elsewhere
        if self.limits.nice:
            os.nice(self.limits.nice)
        if self.limits.cpus:
            os.sched_setaffinity(0, self.limits.cpus)


def _runs(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and stat.state != "Z"


def _start_ticks(pid: int) -> int | None:
    """Return the start time in ticks since boot: with the pid it identifies one process. None without /proc entry."""
    stat = procfs.read_stat(pid)
    return stat.started_ticks if stat is not None else None
