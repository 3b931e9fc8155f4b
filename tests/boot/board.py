"""A computer that can be switched on and off: systemd as PID 1 in systemd-nspawn, on a layer over a cached system."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests import leftovers
from tests.boot.client import Client, once
from tests.boot.image import Suite

PATIENCE_S = 120.0  # for what takes a few seconds when nothing else runs
REBOOT = 133  # how systemd-nspawn ends when its system wants to start again
UNIT = "edgellm.service"
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # ENV_SUPATH in Debian's /etc/login.defs


class Disk:
    """A stack of layers: what is written goes into the uppermost. `freeze()` makes it a lower layer for others."""

    def __init__(self, lowers: Sequence[Path], hostname: str = "board") -> None:
        self.lowers = list(lowers)
        # The name says whose it is from the first moment: another run's sweep() may look at any.
        self.work = Path(tempfile.mkdtemp(prefix=f"edgeboot-{os.getpid()}.{ticks(os.getpid())}-", dir="/tmp"))
        for name in ("upper", "scratch", "root"):
            (self.work / name).mkdir()
        self.root = self.work / "root"
        self.upper = self.work / "upper"
        self.mount()
        (self.root / "etc/hostname").write_text(f"{hostname}\n")
        if not (self.root / "etc/machine-id").exists() or not lowers[1:]:
            (self.root / "etc/machine-id").write_text("")
        (self.root / "var/log/journal").mkdir(parents=True, exist_ok=True)

    def mount(self) -> None:
        options = f"lowerdir={':'.join(map(str, self.lowers))},upperdir={self.upper},workdir={self.work / 'scratch'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)], check=True)

    def freeze(self) -> list[Path]:
        """Unmounts. → the layers that another disk can stand on."""
        self.unmount()
        return [self.upper, *self.lowers]

    def unmount(self) -> None:
        if os.path.ismount(self.root) and subprocess.run(["umount", str(self.root)], check=False).returncode:
            subprocess.run(["umount", "-l", str(self.root)], check=False)

    def drop(self) -> None:
        self.unmount()
        shutil.rmtree(self.work, ignore_errors=True)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        full = self.root / path.lstrip("/")
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_text(text)
        full.chmod(mode)

    def chroot(self, *command: str, timeout: float = 300) -> str:
        """Runs a program in the system without booting it."""
        done = subprocess.run(
            ["chroot", str(self.root), *command], capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout


class Board:
    """A booted system; as a context manager it is off afterwards."""

    def __init__(self, suite: Suite, disk: Disk, options: Sequence[str] = ()) -> None:
        self.suite = suite
        self.disk = disk
        self.options = list(options)
        self.leader: int | None = None
        self.started_s = 0.0  # monotonic: when systemd began
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []
        self._console = disk.work / "console"
        self._cgroup = f"edgeboot-{os.getpid()}-{disk.work.name[-8:]}"
        self._trees = [
            tree for tree in ("systemd", "unified", "") if Path(f"/sys/fs/cgroup/{tree}/cgroup.procs").is_file()
        ]
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.bind(str(disk.work / "notify"))
        self._inbox.settimeout(0.5)
        self._messages: queue.Queue[str] = queue.Queue()
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self.console()[-3000:])
            if self.leader is not None and self.alive():
                print(self.journal(UNIT)[-6000:])
        for client in self._clients:
            client.close()
        self.cut_power()
        self._over.set()
        self._listener.join()
        self._inbox.close()

    # --- power -------------------------------------------------------------------------------------------------------

    def power_on(self, *, wait: bool = True) -> None:
        """Returns when systemd runs, or with `wait` when its first jobs are done."""
        self.leader = None
        with contextlib.suppress(queue.Empty):  # messages of the boot before
            while True:
                self._messages.get_nowait()
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self.disk.work / "notify"),
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1" if self.suite.unified else "0",
        }
        command = ["systemd-nspawn", "-b", "-q", "-D", str(self.disk.root), "--register=no", "--keep-unit"]
        command += [
            "--private-network",
            "--notify-ready=yes",
            "--link-journal=no",
            "--console=read-only",
            *self.options,
        ]
        with self._console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=self._own_cgroup,
            )
        self._wait_for("X_NSPAWN_LEADER_PID=")
        if wait:
            self.wait_booted()

    def wait_booted(self) -> None:
        self._wait_for("READY=1")

    def wait_off(self) -> int:
        """→ how systemd-nspawn ended: 0 off, 133 wants to start again."""
        assert self._nspawn is not None
        code = self._nspawn.wait(PATIENCE_S)
        self._clean()
        return code

    def reboot(self) -> None:
        """Down and up again in order."""
        self.run("systemctl", "reboot")
        assert self.wait_off() == REBOOT
        self.power_on()

    def power_off(self) -> None:
        self.run("systemctl", "poweroff")
        assert self.wait_off() == 0

    def cut_power(self) -> None:
        """PID 1 dies at once, and everything with it. Killing systemd-nspawn alone would leave the system running."""
        if self._nspawn is not None and self._nspawn.poll() is None:
            if self.leader is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.leader, signal.SIGKILL)
            try:
                self._nspawn.wait(20)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait()
        self._clean()

    def alive(self) -> bool:
        return self._nspawn is not None and self._nspawn.poll() is None

    def _own_cgroup(self) -> None:
        """Two boards may run at once, and nothing is left in this machine's root group."""
        os.setsid()
        for tree in self._trees:
            folder = Path(f"/sys/fs/cgroup/{tree}/{self._cgroup}")
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    def _clean(self) -> None:
        for tree in self._trees:
            for folder, _, _ in os.walk(f"/sys/fs/cgroup/{tree}/{self._cgroup}", topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()

    def _listen(self) -> None:
        """Read without a pause: PID 1 of systemd 257 reports every step and blocks on the eleventh unread message."""
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                self._messages.put(self._inbox.recv(8192).decode())

    def _wait_for(self, key: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                message = self._messages.get(timeout=1)
            except queue.Empty:
                assert self.alive(), f"systemd-nspawn ended: {self.console()[-2000:]}"
                continue
            for line in message.splitlines():
                if line.startswith("X_NSPAWN_LEADER_PID="):
                    self.leader = int(line.partition("=")[2])
                    (self.disk.work / "leader").write_text(f"{self.leader} {ticks(self.leader)}")
                    self.started_s = _started_s(self.leader)
            if key in message:
                return
        raise AssertionError(f"no {key} within {PATIENCE_S} s: {self.console()[-2000:]}")

    # --- inside ------------------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, timeout: float = 180) -> str:
        """As root in the running system. → stdout."""
        done = self.execute(*command, timeout=timeout)
        assert not check or done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def execute(self, *command: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "-t", str(self.leader), "-a", "env", "-i", f"PATH={ROOT_PATH}", "LC_ALL=C"]
        return subprocess.run(
            [*enter, *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        )

    def show(self, key: str, unit: str = UNIT) -> str:
        return self.run("systemctl", "show", unit, "-p", key, "--value")

    def main_pid(self, unit: str = UNIT) -> int:
        return int(self.show("MainPID", unit))

    def kill(self, number: str, unit: str = UNIT) -> int:
        """Signals the main process only. → its pid, which is never 0 (that would be our own group)."""
        pid = self.main_pid(unit)
        assert pid > 1, f"{unit} has no main process"
        self.run("kill", f"-{number}", str(pid))
        return pid

    def journal(self, unit: str = UNIT, *options: str) -> str:
        return self.execute("journalctl", "-u", unit, "--no-pager", "-o", "short-monotonic", *options).stdout

    def console(self) -> str:
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    def request(self, method: str, path: str, body: str | None = None, timeout: float = PATIENCE_S) -> tuple[int, Any]:
        """One HTTP exchange. → status and JSON (or text)."""
        answer = once(self.leader, method, path, body, timeout)
        assert "error" not in answer, answer
        with contextlib.suppress(ValueError):
            return answer["status"], json.loads(answer["body"])
        return answer["status"], answer["body"]

    def chat(self, timeout: float = PATIENCE_S) -> tuple[int, Any]:
        return self.request("POST", "/v1/chat/completions", CHAT, timeout)

    def client(self) -> Client:
        """Connects and chats from now on."""
        self._clients.append(Client(self.leader))
        return self._clients[-1]

    def until(self, what: Callable[[], Any], because: str, patience_s: float = PATIENCE_S) -> Any:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if answer := what():
                return answer
            time.sleep(0.1)
        raise AssertionError(f"not within {patience_s} s: {because}")


CHAT = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'


def sweep() -> None:
    """Ends what a test run that was killed left behind: its boards, mounts and folders."""
    for work in Path("/tmp").glob("edgeboot-*.*-*"):
        if leftovers.runs(work.name.split("-")[1].replace(".", ":")):
            continue
        with contextlib.suppress(OSError, ValueError):
            leader, began = map(int, (work / "leader").read_text().split())
            if ticks(leader) == began:
                os.kill(leader, signal.SIGKILL)
                time.sleep(1)
        subprocess.run(["umount", "-l", str(work / "root")], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(work, ignore_errors=True)


def ticks(pid: int) -> int:
    """Return the start time since boot, in ticks of 10 ms; with the pid it identifies one process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _started_s(pid: int) -> float:
    """When a process began, on the monotonic clock."""
    since_boot_s = ticks(pid) / os.sysconf("SC_CLK_TCK")
    return since_boot_s - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()
