"""jtop, a guest in another room: its reader is a process that is watched, replaced, and never waited for.

`JtopSource.run()` finds the interpreter that owns the jtop service, runs jtop_reader.py with it, and takes its lines,
each with a deadline. A reader that hangs, dies or says why it cannot go on is replaced after a growing pause. Where
edgellm-jtop.service shares the lines on a socket (jtop_share.py), they are taken from there. Losing jtop changes
`trouble`, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

from edge.telemetry import interpreter
from edge.telemetry.jtop_line import CALM_S, Trouble, error_line, interval_of, parse, trouble
from edge.telemetry.sample import Sample
from edge.telemetry.source import Clock

log = logging.getLogger("edge.telemetry")

SOCKET = Path("/run/jtop.sock")
READER = Path(__file__).with_name("jtop_reader.py")
_FIRST_LINE_S = 60.0  # the reader gives up by itself before that, and says why
_GRACE_S = 5.0
_HEALTHY_S = 60.0  # a reader that lived so long starts the pauses from the beginning
_MAX_LINE_BYTES = 1 << 20


class JtopSource:
    """`python` None: found by itself at each start. `share`: edgellm-jtop.service's socket, used when it is there.

    `on_line` gets every line of a sample, and a line of the reader's kind for every trouble.
    """

    name = "jtop"

    def __init__(
        self,
        *,
        python: Path | None = None,
        share: Path | None = None,
        clock: Clock = time.monotonic,
        pauses_s: tuple[float, float] = (10.0, 300.0),
        on_line: Callable[[bytes], None] | None = None,
    ) -> None:
        self.latest: Sample | None = None
        self.trouble: Trouble | None = None
        self.restarts = 0
        self._python = python
        self._share = share
        self._clock = clock
        self._pauses_s = pauses_s
        self._on_line = on_line
        self._wish_s = CALM_S
        self._interval_s = CALM_S
        self._writer: asyncio.StreamWriter | None = None
        self._said: str | None = None

    def fresh(self, now: float) -> Sample | None:
        """The latest sample unless it is older than three intervals."""
        sample = self.latest
        return sample if sample is not None and sample.age_s(now) <= 3 * self._interval_s else None

    def pace(self, interval_s: float) -> None:
        """Asks for another interval. It may take the service some seconds."""
        if interval_s != self._wish_s:
            self._wish_s = interval_s
            self._ask()

    async def run(self) -> None:
        """Until cancelled; the reader ends with it."""
        pause_s = self._pauses_s[0]
        while True:
            began = self._clock()
            try:
                found = await self._once()
            except Exception as error:  # no process or thread to be had: whatever it is, it must not end the task
                found = trouble("failed", f"the reader could not be started: {error}")
            self._tell(found)
            if self._on_line is not None:
                self._on_line(error_line(found))
            if self._clock() - began > _HEALTHY_S:
                pause_s = self._pauses_s[0]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pauses_s[1])
            self.restarts += 1

    async def _once(self) -> Trouble:
        """One reader (or one connection to the share), to its end."""
        if self._share is not None and self._share.is_socket():
            try:
                lines, writer = await asyncio.open_unix_connection(self._share, limit=_MAX_LINE_BYTES)
            except OSError as error:
                return trouble("failed", f"{self._share}: {error.strerror}")
            try:
                return await self._take(lines, writer, shared=True)
            finally:
                writer.close()
        refused = why_not(SOCKET)
        if refused is not None:
            return refused
        python = self._python or await asyncio.to_thread(interpreter.find)
        return trouble("not_installed") if python is None else await self._read_with(python)

    async def _read_with(self, python: Path) -> Trouble:
        process = await asyncio.create_subprocess_exec(
            python,
            "-I",
            READER,
            "--interval",
            str(self._wish_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            return await self._take(process.stdout, process.stdin)
        finally:
            await _end(process)

    async def _take(
        self, lines: asyncio.StreamReader, writer: asyncio.StreamWriter, *, shared: bool = False
    ) -> Trouble:
        """Lines until there are none, or none in time. A share outlives its readers' troubles."""
        self._writer = writer
        self._ask()
        try:
            while True:
                line = await asyncio.wait_for(lines.readline(), None if shared else self._deadline_s())
                if not line:
                    return trouble("lost")
                value = parse(line, self._clock())
                if isinstance(value, Trouble):
                    if not shared:
                        return value
                    self._tell(value)
                elif value is not None:
                    self._interval_s = interval_of(line) or self._interval_s
                    self.latest = value
                    self._tell(None)
                    if self._on_line is not None:
                        self._on_line(line)
        except (asyncio.TimeoutError, TimeoutError):
            return trouble("frozen")
        except (OSError, ValueError) as error:  # the pipe broke, or a line without end
            return trouble("failed", str(error))
        finally:
            self._writer = None

    def _deadline_s(self) -> float:
        """While it connects or changes pace the reader is silent for a while, and gives up by itself."""
        settled = self.latest is not None and self.trouble is None and self._wish_s == self._interval_s
        return 3 * self._interval_s + _GRACE_S if settled else _FIRST_LINE_S

    def _ask(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write(b"interval %g\n" % self._wish_s)

    def _tell(self, now: Trouble | None) -> None:
        """One line per change. A machine without jtop is no trouble to tell of."""
        before, self.trouble = self._said, now
        self._said = now.kind if now else "ok"
        if self._said == before:
            return
        if now is None:
            log.info("telemetry: jtop %s", "answers" if before is None else "is back")
        elif before is not None or now.kind not in ("no_socket", "not_installed"):
            log.warning("telemetry: no jtop: %s (%s)", now.because, now.hint)


def why_not(socket: Path) -> Trouble | None:
    """What can be seen of the service's socket before anybody connects."""
    try:
        mode = socket.stat().st_mode
    except OSError:
        return trouble("no_socket")
    if stat.S_ISDIR(mode):
        return trouble("socket_is_directory")
    return None if os.access(socket, os.R_OK | os.W_OK) else trouble("no_access")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Its stdin ends, which it obeys at once; a frozen one is killed with whatever it started."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 1.0)
    except (asyncio.TimeoutError, TimeoutError):
        pass
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
