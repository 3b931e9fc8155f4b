"""Read jtop through a process that is supervised and replaced, and whose loss affects nothing else.

`JtopSource.run()` runs jtop_reader.py with the Python of the jtop service and reads its lines, each with a deadline. A
reader that hangs, dies or reports an error is replaced after a growing pause. Where edgellm-jtop.service shares the
lines on a socket (jtop_share.py), they are read from there. Losing jtop only sets `fault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edge.linux.files import writable_by_others
from edge.linux.timeouts import in_thread
from edge.telemetry.jtop_line import IDLE_INTERVAL_S, JtopFault, error_line, interval_of, jtop_fault, parse
from edge.telemetry.sample import Sample
from edge.telemetry.source import Clock

# Find the Python that runs the jtop service: client and service must come from the same installation (FC-65).

# Where systemd looks for units, first match wins; pip installs jtop.service to the first.
_UNITS = ("etc/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
# The prefixes -@:+! change how systemd runs the program, not which.
_EXEC = re.compile(r"^ExecStart=[-@:+!]*(\S+)", re.MULTILINE)


def find(root: Path = Path("/")) -> Path | None:
    """Return the running service's interpreter, else its unit's, else ours if jetson-stats is installed in it."""
    for candidate in (_of_process(root), _of_unit(root)):
        if candidate is not None and trusted(candidate):
            return candidate
    return Path(sys.executable) if importlib.util.find_spec("jtop") else None


def trusted(path: Path) -> bool:
    """Return whether only root or this user can change what the path runs: each folder, the file, its link's target.

    Any user can start a process named jtop; without this check its program would run as ours.
    """
    try:
        return writable_by_others(path, frozenset({0, os.geteuid()})) is None
    except OSError:
        return False


def _of_process(root: Path) -> Path | None:
    """Return the interpreter of a process `PYTHON …/jtop --force` of root or of this user."""
    for process in sorted((root / "proc").glob("[0-9]*")):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            owner = process.stat().st_uid
        except OSError:
            continue
        ours = owner in (0, os.geteuid())
        if ours and b"--force" in words and len(words) > 2 and words[1].rpartition(b"/")[2] == b"jtop":
            return _python(os.fsdecode(words[0]))
    return None


def _of_unit(root: Path) -> Path | None:
    """Return the shebang's interpreter of the program that jtop.service starts."""
    for folder in _UNITS:
        try:
            program = _EXEC.search((root / folder / "jtop.service").read_text())
            first = (root / program[1].lstrip("/")).read_bytes().split(b"\n", 1)[0] if program else b""
        except (OSError, UnicodeDecodeError):
            continue
        if first.startswith(b"#!"):
            return _python(os.fsdecode(first[2:].strip()).split(" ")[0])
    return None


def _python(word: str) -> Path | None:
    path = Path(word)
    return path if path.is_absolute() and path.name.startswith("python") else None


log = logging.getLogger("edge.telemetry")

SOCKET = Path("/run/jtop.sock")  # fixed in jtop.service.JTOP_PIPE of all versions
READER = Path(__file__).with_name("jtop_reader.py")
_FIRST_LINE_S = 60.0  # the reader gives up by itself before that, with a reason
_GRACE_S = 5.0  # for a board under full load, beyond three intervals
_HEALTHY_S = 60.0  # a reader that ran this long resets the pauses
_MAX_LINE_BYTES = 1 << 20  # asyncio's own limit is 64 KiB, which many GPU processes may exceed


class JtopSource:
    """A source of jtop samples. `python` None: found at each start. `share`: the socket of edgellm-jtop.service.
    `total`: alternatives of rails that make up the board's power.

    `on_line` gets the line of every sample, and an error line for every fault.
    """

    name = "jtop"

    def __init__(
        self,
        *,
        python: Path | None = None,
        share: Path | None = None,
        total: Sequence[Sequence[str]] = (),
        clock: Clock = time.monotonic,
        pauses_s: tuple[float, float] = (10.0, 300.0),
        on_line: Callable[[bytes], None] | None = None,
    ) -> None:
        self.latest: Sample | None = None
        self.fault: JtopFault | None = None
        self.restarts = 0
        self._python = python
        self._share = share
        self._total = total
        self._clock = clock
        self._pauses_s = pauses_s
        self._on_line = on_line
        self._requested_s = IDLE_INTERVAL_S
        self._interval_s = IDLE_INTERVAL_S
        self._writer: asyncio.StreamWriter | None = None
        self._logged: str | None = None

    def fresh(self, now: float) -> Sample | None:
        """Return the latest sample unless it is older than three intervals."""
        sample = self.latest
        return sample if sample is not None and sample.age_s(now) <= 3 * self._interval_s else None

    def set_interval(self, interval_s: float) -> None:
        """Request another interval; it takes the service some seconds to follow."""
        if interval_s != self._requested_s:
            self._requested_s = interval_s
            self._ask()

    async def run(self) -> None:
        """Run readers until cancelled; the last one ends with the task."""
        pause_s = self._pauses_s[0]
        while True:
            began = self._clock()
            try:
                found = await self._once()
            except Exception as error:  # EAGAIN of fork, MemoryError: nothing may end the task
                found = jtop_fault("failed", f"the reader could not be started: {error}")
            self._report(found)
            if self._on_line is not None:
                self._on_line(error_line(found))
            if self._clock() - began > _HEALTHY_S:
                pause_s = self._pauses_s[0]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pauses_s[1])
            self.restarts += 1

    async def _once(self) -> JtopFault:
        """Run one reader, or one connection to the share, to its end."""
        if self._share is not None and self._share.is_socket():
            try:
                lines, writer = await asyncio.open_unix_connection(self._share, limit=_MAX_LINE_BYTES)
            except OSError as error:
                return jtop_fault("failed", f"{self._share}: {error.strerror}")
            try:
                return await self._read_lines(lines, writer, shared=True)
            finally:
                writer.close()
        fault = socket_fault(SOCKET)
        if fault is not None:
            return fault
        python = self._python or await in_thread(find, None)
        return jtop_fault("not_installed") if python is None else await self._read_with(python)

    async def _read_with(self, python: Path) -> JtopFault:
        process = await asyncio.create_subprocess_exec(
            python,
            "-I",
            READER,
            "--interval",
            str(self._requested_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.defpath, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1"},
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            return await self._read_lines(process.stdout, process.stdin)
        finally:
            await _end(process)

    async def _read_lines(
        self, lines: asyncio.StreamReader, writer: asyncio.StreamWriter, *, shared: bool = False
    ) -> JtopFault:
        """Read lines until the end, or until one is late. A share stays open over faults of its reader."""
        self._writer = writer
        self._ask()
        try:
            while True:
                line = await asyncio.wait_for(lines.readline(), None if shared else self._deadline_s())
                if not line:
                    return jtop_fault("lost")
                value = parse(line, self._clock(), self._total)
                if isinstance(value, JtopFault):
                    if not shared:
                        return value
                    self._report(value)
                elif value is not None:
                    self._interval_s = interval_of(line) or self._interval_s
                    self.latest = value
                    self._report(None)
                    if self._on_line is not None:
                        self._on_line(line)
        except (asyncio.TimeoutError, TimeoutError):
            return jtop_fault("frozen")
        except (OSError, ValueError) as error:  # the pipe broke, or a line without end
            return jtop_fault("failed", str(error))
        finally:
            self._writer = None

    def _deadline_s(self) -> float:
        """Return the limit for the next line: long while the reader connects or changes its interval."""
        settled = self.latest is not None and self.fault is None and self._requested_s == self._interval_s
        return 3 * self._interval_s + _GRACE_S if settled else _FIRST_LINE_S

    def _ask(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write(b"interval %g\n" % self._requested_s)

    def _report(self, fault: JtopFault | None) -> None:
        """Log one line per change. A machine without jtop is normal and not logged."""
        before, self.fault = self._logged, fault
        self._logged = fault.kind if fault else "ok"
        if self._logged == before:
            return
        if fault is None:
            log.info("telemetry: jtop %s", "answers" if before is None else "answers again")
        elif before is not None or fault.kind not in ("no_socket", "not_installed"):
            log.warning("telemetry: no jtop: %s (%s)", fault.because, fault.hint)


def socket_fault(socket: Path) -> JtopFault | None:
    """Return the fault that the service's socket shows before connecting (FC-68); None if it can be opened."""
    try:
        mode = socket.stat().st_mode
    except OSError:
        return jtop_fault("no_socket")
    if stat.S_ISDIR(mode):
        return jtop_fault("socket_is_directory")
    return None if os.access(socket, os.R_OK | os.W_OK) else jtop_fault("no_access")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a reader by closing its stdin; kill its process group if it does not follow."""
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
