"""Run one completion of the server on a tiny model: the proof that a binary computes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket as socket_module
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.builder.tiny_model import write_tiny_model
from edge.engine.engine import Engine
from edge.engine.inspect import Identity, how_ended, identity
from edge.errors import EngineBrokenError, EngineDiedError
from edge.linux.files import parse_foreign_json

# Enough for prompt processing, generation and a rate; a tiny model answers in milliseconds.
_TOKENS = 16
# The first CUDA contact took 17 s on one board; the rest is milliseconds.
_DEADLINE_S = 180.0
# A server at verbosity 4 prints about 100 kB on its tiny model, and answers with less.
_READ_MAX_BYTES = 4 << 20
_LOG_MAX_BYTES = 256 << 20  # more would fill a disk before the deadline
# Faults of the program itself: bad instruction, bad address, failed assertion (ggml_abort).
_CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)
_OFFLOAD = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")


class SmokeRun(Struct, frozen=True):
    """The result. `offloaded`: (layers on the GPU, layers), None if the server did not log it."""

    tokens: int
    tokens_s: float
    ready_s: float
    offloaded: tuple[int, int] | None


def smoke(engine: Engine, *, gpu: bool, under: tuple[str, ...] = ()) -> SmokeRun:
    """Start the server on a private socket, request 16 tokens, stop it. `under`: a debugger's command line.

    Raises EngineDiedError if the server ended, EngineBrokenError for every other failure.
    """
    folder = Path(tempfile.mkdtemp(prefix="edgellm-proof-", dir=short_tmp()))
    try:
        return _smoke(engine, folder, gpu, under)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def short_tmp() -> str | None:
    """Return a folder for the socket: its path may have 107 bytes (unix(7)), too few for a long TMPDIR."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"


def _smoke(engine: Engine, folder: Path, gpu: bool, under: tuple[str, ...]) -> SmokeRun:
    who = identity(Path(engine.path))
    log, place = folder / "log", run_folder(folder, who)
    socket = place / "s.sock"
    model = write_tiny_model(folder / "tiny.gguf")
    model.chmod(0o644)  # whatever root's umask
    command = [*under, *smoke_command(engine, model, socket, gpu)]
    with server(command, environment(engine, place), log, who) as child:
        start_s = time.monotonic()
        wait_ready(socket, child, log, start_s + _DEADLINE_S)
        ready_s = time.monotonic() - start_s
        answer = _complete(socket, child, log)
    text = read_log(log)
    offload = _OFFLOAD.search(text)
    timings = answer.get("timings")
    speed = timings.get("predicted_per_second") if isinstance(timings, dict) else None
    return SmokeRun(
        tokens=int(answer.get("tokens_predicted", 0)),
        tokens_s=round(float(speed), 1) if isinstance(speed, (int, float)) else 0.0,
        ready_s=round(ready_s, 3),
        offloaded=(int(offload[1]), int(offload[2])) if offload else None,
    )


def run_folder(folder: Path, who: Identity) -> Path:
    """Make a folder for the server's socket and caches that its user owns; what is read here lies beside it.

    A program of another user could replace a log in a folder of its own: by a link to a file of root's, or a device.
    """
    place = folder / "run"
    place.mkdir(mode=0o700)
    if who.user is not None:
        folder.chmod(0o711)
        os.chown(place, who.user, who.group or 0)
    return place


def read_log(log: Path) -> str:
    """Return the end of a server's log: it prints as much as it likes."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_MAX_BYTES))
        return file.read(_READ_MAX_BYTES).decode(errors="replace")


def smoke_command(engine: Engine, model: Path, socket: Path, gpu: bool) -> list[str]:
    """Return the command line, with options of this server's --help only."""
    wanted: list[tuple[str, ...]] = [
        ("--ctx-size", "256"),
        ("--parallel", "1"),
        ("--n-gpu-layers", "99" if gpu else "0"),
    ]
    wanted += [("--fit", "off"), ("--no-warmup",), ("--log-verbosity", "4"), ("--threads", "2")]
    if not gpu and engine.devices:
        wanted.append(("--device", "none"))
    wanted += [off.args for off in engine.without if off.args]
    known = [argument for option in wanted if engine.has(option[0]) for argument in option]
    return [engine.path, "--model", str(model), "--host", str(socket), *known]


def environment(engine: Engine, folder: Path) -> dict[str, str]:
    """Return the variables of a server that runs in `folder`."""
    environment = {
        "LC_ALL": "C",
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "LLAMA_CACHE": str(folder),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if engine.library_path:
        environment["LD_LIBRARY_PATH"] = engine.library_path
    for off in engine.without:
        environment |= off.environment
    if engine.progress_protocol:
        environment["LLAMA_SERVER_ROUTER_PORT"] = "9"  # and with it: it ends when our end of stdin closes
    return environment


@contextlib.contextmanager
def server(
    command: list[str], variables: dict[str, str], log: Path, who: Identity
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, and end it. Raises EngineBrokenError."""
    with log.open("wb") as file:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=variables,
                start_new_session=True,
                user=who.user,
                group=who.group,
                extra_groups=who.groups,
            )
        except OSError as error:
            raise EngineBrokenError(f"{command[0]} cannot be started: {error.strerror}") from error
        try:
            yield child
        finally:
            # SIGTERM first, so that the server frees its GPU context in order.
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(BrokenPipeError):
                assert child.stdin is not None
                child.stdin.close()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_ready(socket: Path, child: subprocess.Popen[bytes], log: Path, deadline_s: float) -> None:
    while True:
        code = child.poll()
        if code is not None:
            raise _died(code, log)
        with contextlib.suppress(OSError, HTTPException):
            if request(socket, "GET", "/health")[0] == 200:
                return
        # Generous: JIT compilation of PTX on a first start takes minutes on a slow core.
        if log.stat().st_size > _LOG_MAX_BYTES:
            raise EngineBrokenError(f"the smoke run prints without end: {last_line(log)[:200]}")
        if time.monotonic() > deadline_s:
            raise EngineBrokenError(f"the smoke run was not ready within {_DEADLINE_S:.0f} s: {last_line(log)}")
        time.sleep(0.02)


def _died(code: int, log: Path) -> EngineDiedError:
    """Return the error for a server that ended: only a crash is a reason to try again with less."""
    text = read_log(log)
    if code >= 0:
        return EngineDiedError(f"the smoke run died (exit code {code}): {last_line(log)}", text, crashed=False)
    message = f"the smoke run died ({how_ended(code)}): {last_line(log)}"
    # SIGKILL is the kernel's or an operator's, and SIGTERM an operator's: neither is the engine's own fault.
    return EngineDiedError(message, text, crashed=-code in _CRASHES)


def _complete(socket: Path, child: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    # ignore_eos: random weights may choose the end token at once, and a proof counts 16.
    question = {"prompt": "edgellm", "n_predict": _TOKENS, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
    try:
        status, body = request(socket, "POST", "/completion", json.dumps(question))
        answer = parse_foreign_json(body)
    except (OSError, HTTPException, ValueError) as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise _died(child.wait(timeout=5), log) from error
        raise EngineBrokenError(f"the smoke completion got no answer: {last_line(log)}") from error
    found: dict[str, Any] = answer if isinstance(answer, dict) else {}
    tokens = found.get("tokens_predicted")
    if status != 200 or not isinstance(tokens, int) or tokens < 1:
        raise EngineBrokenError(f"the smoke completion failed with {status}: {last_line(log)}")
    return found


class _UnixConnection(HTTPConnection):
    """An HTTP connection over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket_module.socket(socket_module.AF_UNIX, socket_module.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def request(
    path: Path, method: str, target: str, body: str | None = None, *, timeout_s: float = _DEADLINE_S
) -> tuple[int, bytes]:
    """Ask an engine at its unix socket; return (status, body). Raises OSError or HTTPException.

    `timeout_s` bounds the whole answer: a socket's own timeout begins anew with each byte.
    """
    with contextlib.closing(_UnixConnection(path, timeout_s)) as connection:
        connection.connect()
        end_s = time.monotonic() + timeout_s
        end = threading.Timer(timeout_s, _hang_up, [connection.sock])
        end.start()
        try:
            connection.request(method, target, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            answer = response.read(_READ_MAX_BYTES + 1)
            if time.monotonic() >= end_s:
                raise TimeoutError("the answer has not ended in time")
        finally:
            end.cancel()
        if len(answer) > _READ_MAX_BYTES:
            raise HTTPException("the answer has no end")
        return response.status, answer


def _hang_up(sock: socket_module.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket_module.SHUT_RDWR)


def last_line(log: Path) -> str:
    """Return the last error line of a log, else its last line."""
    lines = [line.strip() for line in read_log(log).splitlines() if line.strip()]
    errors = [line for line in lines if " E " in line or "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[-1]


# Where a server crashed: the instruction and the function, from gdb where it is installed.

# `=> 0x5555555 <ggml_backend_amx_mul_mat+42>:  ldtilecfg -0x80(%rsp)`, the answer to `x/i $pc`.
_INSTRUCTION = re.compile(r"^=> 0x[0-9a-f]+(?: <[^>]*>)?:\s+(.+?)\s*$", re.MULTILINE)
# `#0  0x000055 in ggml_compute_forward (...)`, or without the address where the line is known.
_FRAME = re.compile(r"^#0\s+(?:0x[0-9a-f]+ in )?([^\s(]+)", re.MULTILINE)


def locate_crash(engine: Engine, *, gpu: bool) -> str | None:
    """Run the engine once more under gdb: "ldtilecfg in ggml_backend_amx_mul_mat". None without gdb or a crash."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return None
    # -nx: no ~/.gdbinit. A build has no debug information to fetch, and a question on the terminal would wait forever.
    options = ("-nx", "-q", "-batch", "-iex", "set debuginfod enabled off", "-ex", "set confirm off")
    # llama-server ignores SIGPIPE; a stop there would be taken for the crash.
    steps = ("-ex", "handle SIGPIPE SIGTERM nostop noprint pass", "-ex", "run", "-ex", "x/i $pc", "-ex", "bt 1")
    try:
        smoke(engine, gpu=gpu, under=(gdb, *options, *steps, "--args"))
    except EngineDiedError as error:
        return crash_place(error.log)
    except EngineBrokenError:
        return None
    return None


def crash_place(text: str) -> str | None:
    """Read gdb's answers. Pure."""
    instruction, frame = _INSTRUCTION.search(text), _FRAME.search(text)
    if instruction is None:
        return None
    name = " ".join(instruction[1].split())
    return f"{name} in {frame[1]}" if frame else name
