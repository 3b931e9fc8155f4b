"""Supervise llama.cpp's rpc-server, which lends this board's memory and compute to the engine of another one.

Three of the six gates apply: driver, context and backend. The engine that uses the server reports weights, cache and
the first token.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from edge.config.devices import RpcAddress
from edge.engine.engine import Engine
from edge.errors import ConfigError, EdgeError, EngineMissingError, RemoteMissingError
from edge.linux.procfs import read_usage
from edge.linux.rpc import ask_memory, clients
from edge.linux.timeouts import DeadlineExceeded, happens, in_thread, within
from edge.supervisor.diagnose import Death, diagnose
from edge.supervisor.gates import Gates
from edge.supervisor.log_patterns import Patterns
from edge.supervisor.policy import EngineFault, Policy
from edge.supervisor.process import Child, spawn
from edge.supervisor.process_io import read_lines, reaped
from edge.supervisor.start_log import LINE_CHARACTERS
from edge.supervisor.status import Failure
from edge.units import GIB, counted, format_bytes

_PROGRAMS = ("ggml-rpc-server", "rpc-server")  # since May 2026, and before
_START_S = 90.0  # the first CUDA calls after a cold boot have taken that long (llama.cpp#27923)
_LOOK_S = 0.2
_KEPT_LINES = 200
_TENSOR = re.compile("[0-9a-f]{16}")  # the FNV hash of its bytes (ggml-rpc.cpp, rpc_server::set_tensor)
_DISK_FREE_BYTES = 2 * GIB  # the cache leaves them free: a full disk stops logs and updates
_DEAD_LOOKS = 2  # in a row, without a tick of CPU time: no engine uses the connection


class RpcRequest(Struct, frozen=True):
    """What to run. `wants_gpu`: a CPU is no substitute, since the other board's plan counts on the GPU's speed."""

    program: Path
    address: RpcAddress
    env: Mapping[str, str]
    devices: tuple[str, ...] = ()  # empty: the GPUs, else the CPU (tools/rpc/rpc-server.cpp)
    threads: int = 0  # 0: half of the processors, as rpc-server decides
    cache_bytes: int | None = None  # most of large tensors kept in files, which a next load need not send; None: none
    wants_gpu: bool = False
    driver: str | None = None  # evidence that the GPU's device nodes open
    policy: Policy = field(default_factory=Policy)
    look_s: float = 5.0  # how often a connection of an engine that is gone is looked for


def program_of(engine: Engine) -> Path:
    """Return the rpc-server beside an engine. Raises EngineMissingError."""
    hint = "`edgellm build --rpc` builds both"
    if engine.kind == "embedded":
        raise EngineMissingError("the embedded engine has no rpc-server", hint)
    folder = Path(engine.path).parent
    found = next((folder / name for name in _PROGRAMS if (folder / name).is_file()), None)
    if found is None:
        raise EngineMissingError(f"the engine {engine.id} was built without its rpc-server", hint)
    return found


def command(request: RpcRequest) -> tuple[str, ...]:
    """Return the command line."""
    line = [str(request.program), "--host", request.address.host, "--port", str(request.address.port)]
    line += ["--device", ",".join(request.devices)] if request.devices else []
    line += ["--threads", str(request.threads)] if request.threads else []
    return (*line, *(["--cache"] if request.cache_bytes is not None else []))


def trim_cache(folder: Path, most_bytes: int) -> int:
    """Remove the tensors used longest ago until the rest is within the limit and the disk has room. Blocking.

    Return how many were removed. They may go at any moment: an engine sends again what the server does not find.
    """
    files: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            state = path.lstat()
            if _TENSOR.fullmatch(path.name) and stat.S_ISREG(state.st_mode):
                files.append((max(state.st_atime, state.st_mtime), state.st_blocks * 512, path))
        disk = os.statvfs(folder)
        left = min(most_bytes, sum(row[1] for row in files) + disk.f_bavail * disk.f_frsize - _DISK_FREE_BYTES)
        removed = 0
        for _, size, path in sorted(files, reverse=True):
            left -= size
            if left < 0:
                path.unlink()
                removed += 1
        return removed
    return 0


class RpcServer:
    """The supervisor of one rpc-server. `say` takes a sentence for each change, `on_line` each line of its log."""

    def __init__(
        self,
        request: RpcRequest,
        table: Mapping[str, Any],
        say: Callable[[str], None],
        on_line: Callable[[str], None] = lambda _: None,
        on_ready: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.gates = Gates(time.monotonic())
        self.restarts = 0
        self.clients = 0
        self._request = request
        self._patterns = Patterns(table)
        self._device = re.compile(table["rpc"]["device"])
        self._say = say
        self._on_line = on_line
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        self._listed: list[str] = []
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready_s: float | None = None

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Keep it running until `stop`. Raises ConfigError for a fault that another start would repeat."""
        crashes = 0
        while not self._stopping.is_set():
            failure, permanent = await self._serve_once()
            if self._stopping.is_set():
                return
            if permanent:
                raise ConfigError(f"the rpc-server does not run: {failure.kind}: {_last(failure)}", failure.hint)
            stable = self._ready_s is not None and time.monotonic() - self._ready_s >= self._request.policy.stable_s
            crashes = 1 if stable else crashes + 1
            pause_s = self._request.policy.backoff(crashes, random.random())
            self._say(f"{failure.kind}: {_last(failure)} ({failure.hint}); again in {pause_s:.0f} s")
            self.restarts += 1
            await happens(self._stopping, pause_s)

    async def _serve_once(self) -> tuple[Failure, bool]:
        """Run one process to its end. Return its failure, and whether another start would see the same."""
        request = self._request
        self.gates, self.clients, self._ready_s = Gates(time.monotonic()), 0, None
        self._listed.clear()
        self._tail.clear()
        await self._trim()
        # It has no socket in the file system: `spawn` only removes what a former child left at that path.
        child = spawn(command(request), request.env, Path("/nonexistent/rpc.sock"))
        errors, error_lines = await read_lines(child.stderr, self._line)
        outputs, output_lines = await read_lines(child.stdout, self._line)
        ended = asyncio.create_task(reaped(child))
        try:
            refused = await self._open_gates(child, ended)
            if refused is None:
                refused = await self._attend(child, ended)
            await self._end(child, ended)
            with suppress(DeadlineExceeded):
                await within(asyncio.gather(error_lines.ended.wait(), output_lines.ended.wait()), _LOOK_S)
        finally:
            ended.cancel()
            errors.close()
            outputs.close()
            child.close()
        if refused is not None:
            return refused, False
        if not ended.done() or ended.cancelled():
            return Failure("hung", "it does not end after SIGKILL", "the driver holds it: see `dmesg`"), False
        status = ended.result().of_engine()
        found = diagnose(Death(status, list(self._tail), served=self._ready_s is not None), self._patterns)
        return found.failure, found.fault is EngineFault.PERMANENT

    async def _open_gates(self, child: Child, ended: asyncio.Task[Any]) -> Failure | None:
        """Ask it by its own protocol until it answers. Return why it must not serve; None where it may, or ended."""
        request, address = self._request, self._request.address
        limit_s = time.monotonic() + _START_S
        evidence = request.driver or ("its device list is the evidence" if request.wants_gpu else "no GPU wanted")
        self.gates = self.gates.open("driver", time.monotonic(), evidence)
        while not ended.done() and not self._stopping.is_set():
            try:
                devices = await in_thread(partial(ask_memory, address.host, address.port), None)
            except RemoteMissingError as error:
                if error.busy and clients(child.pid, address.host, address.port).served:
                    return self._judge(None, len(self._listed))  # it serves an engine already, which asked first
                if time.monotonic() >= limit_s:
                    return Failure("hung", str(error), "it does not answer and is ended; see its log")
                await asyncio.sleep(_LOOK_S)
                continue
            except EdgeError as error:
                return Failure("socket_busy", str(error), error.hint or "another program answers at this address")
            await asyncio.sleep(_LOOK_S)  # it writes its list of devices with the first connection
            if ended.done():
                return None  # another program answered at this address
            return self._judge(sum(each.free_bytes for each in devices), len(devices))
        return None

    async def _attend(self, child: Child, ended: asyncio.Task[Any]) -> Failure | None:
        """Wait until it ends or is to stop. Return a failure where it waits for an engine that is gone.

        A board that loses its power closes no connection, and rpc-server reads from it without end (it sets no
        SO_KEEPALIVE). The same board asks anew when it is back; one that still has its engine does not ask.
        """
        stop = asyncio.create_task(self._stopping.wait())
        address, idle_looks, cpu_s = self._request.address, 0, -1.0
        try:
            while True:
                done, _ = await asyncio.wait({ended, stop}, timeout=self._request.look_s, return_when="FIRST_COMPLETED")
                if done:
                    return None
                await self._trim()
                usage = read_usage(child.pid)
                returned = clients(child.pid, address.host, address.port).returned
                worked = usage is None or usage.cpu_s != cpu_s
                idle_looks = idle_looks + 1 if returned and not worked else 0
                cpu_s = usage.cpu_s if usage is not None else -1.0
                if idle_looks >= _DEAD_LOOKS:
                    hint = "it is started again, without that connection"
                    return Failure("peer_gone", "the board that was connected asks anew: its engine is gone", hint)
        finally:
            stop.cancel()

    async def _trim(self) -> None:
        folder, most_bytes = self._request.env.get("LLAMA_CACHE"), self._request.cache_bytes
        if folder and most_bytes is not None:
            await in_thread(partial(trim_cache, Path(folder) / "rpc", most_bytes), None)

    def _judge(self, free_bytes: int | None, count: int) -> Failure | None:
        now_s, listed = time.monotonic(), ", ".join(self._listed) or counted(count, "device")
        if self._request.wants_gpu and self._listed and all(each.startswith("CPU") for each in self._listed):
            self.gates = self.gates.refuse("context", listed)
            hint = "was it built with CUDA, and does the driver answer (`edgellm doctor`)? `--device CPU` takes the CPU"
            return Failure("cpu_only", f"the rpc-server found no GPU: {listed}", hint)
        self.gates = self.gates.open("context", now_s, listed)
        self.gates = self.gates.open("backend", now_s, f"answers the RPC protocol with {counted(count, 'device')}")
        self._ready_s = now_s
        free = "serves an engine" if free_bytes is None else f"{format_bytes(free_bytes)} free"
        sentence = f"rpc-server at {self._request.address}: {listed}, {free}"
        self._say(sentence)
        self._on_ready(sentence)
        return None

    def _line(self, line: str) -> None:
        line = line[:LINE_CHARACTERS]
        self._tail.append(line)
        self._on_line(line)
        if self._ready_s is None and (match := self._device.match(line)):
            self._listed.append(f"{match['device']} {match['name']}")
        elif self._ready_s is not None and line == "Accepted client connection":
            self.clients += 1
            self._say("an engine is connected")
        elif self._ready_s is not None and line == "Client connection closed":
            self.clients = max(0, self.clients - 1)
            self._say("the engine's connection is closed")

    async def _end(self, child: Child, ended: asyncio.Task[Any]) -> None:
        """End a process that still runs: TERM, then KILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if ended.done():
                return
            child.send(number)
            await asyncio.wait({ended}, timeout=self._request.policy.term_s)


def _last(failure: Failure) -> str:
    lines = failure.evidence.strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
