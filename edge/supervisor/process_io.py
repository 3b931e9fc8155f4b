"""Wait for the end of a process and read its pipes, on the event loop. By pidfd (Linux 5.3), else by polling."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from edge.supervisor.process import Child, ExitStatus

FALLBACK_POLL_S = 0.05  # only for kernels before 5.3: JetPack 5 has 5.10, JetPack 4 (4.9) polls


async def gone(pid: int) -> None:
    """Return once the process has ended; it still has to be reaped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        while not _ended(pid):
            await asyncio.sleep(FALLBACK_POLL_S)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def reaped(child: Child) -> ExitStatus:
    """Wait for the end and reap it. A pidfd is readable shortly before the zombie can be reaped."""
    await gone(child.pid)
    child.drop_guard()
    while (status := child.poll()) is None:
        await asyncio.sleep(0.001)
    return status


def _ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # another process's child
        return not Path(f"/proc/{pid}").exists()


# Read lines of a pipe into a callback on the event loop. A line without an end is cut.

LINE_BYTES_MAX = 64 * 1024
# Lines of a start cost up to 0.3 µs a byte (all patterns): 8 KiB are 2.5 ms, after which other tasks have their turn. A
# request takes several turns of the loop, each of which waits for one of these.
TURN_BYTES = 8 * 1024
# The whole log of a start is read at once. What comes beyond that within a second is a flood: one turn in 5 ms takes a
# fifth of a core, and the engine waits for its pipe.
BURST_BYTES = 512 * 1024
FLOOD_PAUSE_S = 0.005


class PipeLines(asyncio.Protocol):
    """A protocol that calls `on_line` for each line. `ended` is set when every writer has closed the pipe.

    `partial` counts reads without the end of a line: llama.cpp prints dots while it reads tensors. An engine that
    floods its log waits for its pipe: the gateway, probes and the watchdog share the loop with its lines.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.ended = asyncio.Event()
        self.partial = 0
        self._on_line = on_line
        self._rest = b""
        self._lines: deque[bytes] = deque()
        self._transport: asyncio.ReadTransport | None = None
        self._lost = False
        self._waiting = False  # the next turn is scheduled
        self._second_s = 0.0  # when the present second began, and the bytes of it
        self._second_bytes = 0
        self._hurry = False
        self._paused = False  # pipe transports know is_reading() only since Python 3.12 (and 3.11.4)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.partial += b"\n" not in data
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(whole)
        if len(self._rest) > LINE_BYTES_MAX:
            self._lines.append(self._rest)
            self._rest = b""
        self._turn()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._rest:
            self._lines.append(self._rest)
            self._rest = b""
        self._turn()

    def hurry(self) -> None:
        """Read what is left without pauses: its writer has ended, and the cause is in the last lines."""
        self._hurry = True

    def _turn(self) -> None:
        if self._waiting:
            return
        done = 0
        try:
            while self._lines and done < TURN_BYTES:
                line = self._lines.popleft()
                done += len(line) + 1
                self._on_line(_text(line))
        finally:  # also after a line that cannot be taken: the engine waits for its pipe
            self._go_on(done)

    def _go_on(self, done: int) -> None:
        """Schedule the next turn, or read on. `done`: bytes of the lines of this turn."""
        flood = done > 0 and self._floods(done)
        if self._lines or flood:
            self._pause(True)
            self._waiting = True
            asyncio.get_running_loop().call_later(FLOOD_PAUSE_S if flood else 0, self._next)
        elif self._lost:
            self.ended.set()
        else:
            self._pause(False)

    def _floods(self, count: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._second_s >= 1.0:
            self._second_s, self._second_bytes = now_s, 0
        self._second_bytes += count
        return self._second_bytes > BURST_BYTES and not (self._lost or self._hurry)

    def _next(self) -> None:
        self._waiting = False
        self._turn()

    def _pause(self, pause: bool) -> None:
        transport = self._transport
        if transport is None or self._lost or transport.is_closing():
            return
        if pause is self._paused:
            return
        self._paused = pause
        if pause:
            transport.pause_reading()
        else:
            transport.resume_reading()


def _text(line: bytes) -> str:
    return line[:LINE_BYTES_MAX].decode(errors="replace").rstrip()


async def read_lines(pipe: IO[bytes], on_line: Callable[[str], None]) -> tuple[asyncio.ReadTransport, PipeLines]:
    """Start reading a pipe. Close the transport at the end."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_read_pipe(lambda: PipeLines(on_line), pipe)
    return transport, protocol
