"""The real, unmodified jtop service (jetson-stats) on a fake board, without systemd.

It runs in a private mount namespace in which the board's tree lies over /sys, /proc, /etc and /usr/bin, and listens on
the real /run/jtop.sock: the real client in an ordinary process talks to it. Nothing else on the machine changes. Needs
root, `unshare`, overlayfs. One board per machine at a time, because the socket's path is fixed: `only_one()`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fakes.fake_jetson.files import put
from tests.fakes.fake_jetson.tree import HERE, FakeBoard

SOCKET = Path("/run/jtop.sock")
_LOCK = Path(f"/tmp/edgellm-fake-jetson-{os.geteuid()}.lock")  # a lock of another user could not be opened
_READY_S = 30.0


def why_not() -> str | None:
    """A reason why the service cannot run on this machine."""
    if os.geteuid() != 0:
        return "needs root for a mount namespace"
    if listened_to():
        return f"{SOCKET} answers: a real jtop service runs here"
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "no mount namespaces here"
    return None


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not listened_to():  # a run that was killed leaves its socket file behind
            with contextlib.suppress(OSError):
                SOCKET.unlink(missing_ok=True)
        yield


def listened_to() -> bool:
    """Whether a process accepts connections at the service's socket; True as well where that can't be tried."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(SOCKET))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True


class JtopService:
    """`python` is the interpreter that has jetson-stats."""

    def __init__(self, board: FakeBoard, python: Path) -> None:
        self.board, self.python = board, python
        self.log = board.root / "jtop.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> JtopService:
        if SOCKET.exists():
            raise RuntimeError(f"{SOCKET} exists: another jtop service is running")
        # It ends with the test run, also with one that is killed.
        command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "private", "--"]
        command += ["/bin/sh", str(HERE / "enter.sh")]
        program = self.board.root / "launch/jtop"  # so that its command line reads as on a board: PYTHON …/jtop --force
        put(program, (HERE / "jtop_service.py").read_bytes())
        command += [str(self.board.root), str(self.python), str(program), "--force"]
        # jtop runs swapon, which an ordinary user's PATH does not have.
        path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
        env = {**os.environ, "PATH": path, "JTOP_SERVICE": "True", "PYTHONUNBUFFERED": "1"}
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if SOCKET.exists() and b"service ready" in self.log.read_bytes()[before:]:
                return self
            time.sleep(0.02)
        self.kill()
        raise RuntimeError("jtop service not ready:\n" + self.log.read_text())

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM to the main process, then what systemd does with the rest of the cgroup. The socket file goes."""
        self._end(signal.SIGTERM)
        SOCKET.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL: the socket file stays, as on a board. `clean()` is what the unit's --force does at its start."""
        self._end(signal.SIGKILL)

    def clean(self) -> None:
        SOCKET.unlink(missing_ok=True)

    def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _signal_all(self, number: signal.Signals) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, number)
