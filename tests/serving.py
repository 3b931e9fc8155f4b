"""A real `edgellm up` in a process of its own, for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from edge.cli.client import Client
from edge.paths import folders

ROOT = Path(__file__).resolve().parent.parent
DEMO = "SmolLM2-135M-Instruct"
PATIENCE_S = 60  # machines that run tests are slow and shared; nothing here waits so long when all is well


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def edgellm(
    *arguments: str, env: dict[str, str] | None = None, timeout: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "edge", *arguments],
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", **(extra or {})}


def eventually(
    what: Callable[[], Any], because: str | Callable[[], str], patience_s: float = PATIENCE_S, pause_s: float = 0.01
) -> Any:
    """Return the first true answer. Fails with `because`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if answer := what():
            return answer
        time.sleep(pause_s)
    raise AssertionError(f"not within {patience_s} s: {because if isinstance(because, str) else because()}")


class Up:
    """`edgellm up` with its own state folder and port. Use as a context manager. `program`: another way to start it."""

    def __init__(
        self,
        state: Path,
        *arguments: str,
        port: int | None = None,
        env: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "edge", "up"),
    ) -> None:
        self.state = state
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = state / "up.log"
        state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *program, "--state-dir", str(state), "--json"]
        # ggml's threads spin at their barriers: two of them on two busy cores wait for each other for seconds.
        command += ["--set", "n_threads=1"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--listen", f"127.0.0.1:{self.port}", *arguments],
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The last line may be half written."""
        return [json.loads(line) for line in self.output.split("\n")[:-1] if line.startswith("{")]

    def healthz(self) -> dict[str, Any]:
        """{} while no process answers."""
        try:
            # With `verify` httpx loads certificates for each request: 23 ms of the processor that the server needs.
            document: dict[str, Any] = httpx.get(f"{self.url}/healthz", timeout=10, verify=False).json()
            return document
        except (httpx.HTTPError, ValueError):
            return {}

    def wait_for(self, *statuses: str) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            assert self.process.poll() is None, f"edgellm ended with {self.process.returncode}:\n{self.output}"
            document = self.healthz()
            return document if document.get("status") in statuses else None

        document: dict[str, Any] = eventually(
            there, lambda: f"{statuses}; {self.healthz()}; it said:\n{self.output}", pause_s=0.03
        )
        return document

    def status(self) -> dict[str, Any]:
        """Return the control socket's document."""
        with closing(Client(folders({}, self.state))) as client:
            return client.status()

    def child_pid(self) -> int:
        (model,) = self.status()["models"].values()
        pid: int = model["pid"]
        return pid

    def chat(
        self, text: str = "Hello", *, max_tokens: int = 4, timeout: float = PATIENCE_S, **more: Any
    ) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0, **more}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout, verify=False)


def children(pid: int) -> list[int]:
    """Return the direct children of a process, zombies too, without those between fork and exec.

    A child that is stopped before its exec would hold up its parent, which waits for the exec.
    """
    found: Sequence[str] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if _command(int(child)) != _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process: what it would answer in milliseconds waits until the test has seen it wait."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    """A zombie is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
