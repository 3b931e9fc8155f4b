"""Run cmake and ninja with a log and progress, and end all their processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from edge.errors import BuildError
from edge.linux.procfs import session_pids

# Turn ninja's counter into progress and remaining time. Pure.

# NINJA_STATUS of our builds; the rest of the line is what is being made.
STATUS = "[%f/%t] "
_LINE = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")
_CUDA_WEIGHT = 8.0  # so many C++ steps take as long as one of CUDA


class NinjaProgress(Struct, frozen=True):
    """Progress of a build. `eta_s` is None until enough steps are done."""

    done: int
    total: int
    what: str
    elapsed_s: float
    eta_s: float | None = None

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 0.0


class BuildMeter(Struct):
    """Estimator of the remaining time."""

    cuda_steps: int = 0  # how many .cu files the whole build has
    _cuda_done: int = 0

    def read(self, line: str, elapsed_s: float) -> NinjaProgress | None:
        """Return the progress after a line, None for lines that are no step."""
        match = _LINE.match(line.rstrip())
        if match is None:
            return None
        done, total = int(match[1]), int(match[2])
        if "CUDA object" in match[3]:
            self._cuda_done += 1
        return NinjaProgress(done, total, _what(match[3]), elapsed_s, self._eta(done, total, elapsed_s))

    def _eta(self, done: int, total: int, elapsed_s: float) -> float | None:
        # The first steps are small C files, which say little about the rest.
        if done < 8 or elapsed_s < 5:
            return None
        cuda_total = min(self.cuda_steps, total)
        spent = (done - self._cuda_done) + self._cuda_done * _CUDA_WEIGHT
        whole = (total - cuda_total) + cuda_total * _CUDA_WEIGHT
        return max(0.0, elapsed_s * (whole - spent) / spent)


def _what(text: str) -> str:
    """Return the file of a step: `Building CXX object src/llama.dir/llama-quant.cpp.o` → `llama-quant.cpp`."""
    last = text.split()[-1] if text.split() else text
    return last.rsplit("/", 1)[-1].removesuffix(".o")


# ninja ends its compilers at SIGINT; nvcc's passes took up to 6 s to stop on two cores.
_GRACE_S = 10.0
# An allow-list: CFLAGS, CUDAARCHS or LD_PRELOAD of a shell would make another engine under the same fingerprint.
_ALLOWED = ("HOME", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE")

OnLine = Callable[[str], None]


def build_environment(environment: Mapping[str, str], first_on_path: Sequence[str]) -> dict[str, str]:
    """Return the compilers' whole environment, ccache's variables included."""
    path = [*first_on_path, *environment.get("PATH", "/usr/local/bin:/usr/bin:/bin").split(":")]
    kept = {name: environment[name] for name in _ALLOWED if name in environment}
    kept.update({name: value for name, value in environment.items() if name.startswith("CCACHE_")})
    return {**kept, "PATH": ":".join(dict.fromkeys(path)), "LC_ALL": "C", "NINJA_STATUS": STATUS}


def run_logged(command: Sequence[str], environment: Mapping[str, str], log: Path, on_line: OnLine) -> int:
    """Run a command and return its exit code, 127 if it cannot start. Its output goes to the log and to `on_line`.

    A log that cannot be written does not end the command: on a full disk the compiler's message still arrives.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered: what a killed build printed last is in the log.
    with log.open("ab", buffering=0) as file:

        def write(text: str) -> None:
            with suppress(OSError):
                file.write(text.encode(errors="replace"))

        write(f"$ {' '.join(command)}\n")
        try:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=dict(environment),
                # A session of its own, so that its compilers can be found and ended by it.
                start_new_session=True,
            )
        except OSError as error:
            write(f"{command[0]}: {error.strerror}\n")
            return 127
        try:
            assert child.stdout is not None
            for line in child.stdout:
                write(line)
                on_line(line.rstrip("\n"))
            return child.wait()
        except BaseException:
            end_session(child)
            raise
        finally:
            assert child.stdout is not None
            child.stdout.close()
            child.wait()


def end_session(child: subprocess.Popen[str]) -> None:
    """Interrupt a session, wait, then kill the rest of it: compilers have process groups of their own.

    Only processes of the child's own session (its id is the child's pid) get a signal.
    """
    for sign, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        for pid in session_pids(child.pid):
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            child.poll()
            if not session_pids(child.pid):
                return
            time.sleep(0.05)


def make(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    cuda_steps: int,
    on_progress: Callable[[NinjaProgress], None],
    on_line: OnLine,
) -> int:
    """Run ninja, report its progress, and return its exit code."""
    meter = BuildMeter(cuda_steps)
    start_s = time.monotonic()

    def read(line: str) -> None:
        on_line(line)
        progress = meter.read(line, time.monotonic() - start_s)
        if progress is not None:
            on_progress(progress)

    return run_logged(command, environment, log, read)


def count_cuda_steps(build_dir: Path) -> int:
    """Return how many .cu files the configured build compiles."""
    try:
        text = (build_dir / "build.ninja").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return sum(1 for line in text.splitlines() if line.startswith("build ") and ".cu.o: CUDA_COMPILER" in line)


# Diagnose a failed build by signatures in its whole log. Pure.

# How gcc, nvcc, ninja and cmake start the line of an error.
_FIRST_ERROR = re.compile(r"(?:\berror\b|\bfatal\b|FAILED:|CMake Error)", re.IGNORECASE)

_MESSAGE_LINES = 40  # the text of a failed try_compile, with the compiler's output in it

_MEMORY = "out-of-memory"  # the row that a number may choose
# A process that SIGKILL ended, as subprocess and as a shell report it.
_KILLED = (-9, 137)


class BuildFailure(Struct, frozen=True):
    """A diagnosis. `retry`: None, `half` (the jobs) or `baseline` (CPU architecture). `evidence`: lines of the log."""

    id: str
    sentence: str
    hint: str | None
    retry: str | None
    evidence: tuple[str, ...]

    def error(self, log: Path) -> BuildError:
        table = "\n".join(f"  {line}" for line in self.evidence)
        return BuildError(f"{self.sentence} (log: {log})", self.hint, table=table or None)


def diagnose(
    lines: Iterable[str], table: Iterable[Mapping[str, Any]], *, code: int = 1, oom_kills: int = 0
) -> BuildFailure:
    """Return the first signature of the table that any line matches, with the first error lines as evidence.

    `code`: the build's own exit code, `oom_kills`: processes that the kernel killed meanwhile; these numbers decide
    before any line. The whole log is read, not its tail: ninja finishes other steps after the one that failed.
    """
    kept = list(lines)
    rows = list(table)
    for entry in rows:
        pattern = re.compile(entry["pattern"])
        matching = [line.strip() for line in kept if pattern.search(line)]
        if matching and not (oom_kills and entry["id"] != _MEMORY):
            return _named(entry, matching)
    if oom_kills or code in _KILLED:
        memory = next(entry for entry in rows if entry["id"] == _MEMORY)
        how = f"the kernel killed {oom_kills} of its processes" if oom_kills else f"the build ended with {code}"
        return _named(memory, [how])
    errors = _errors(kept)
    last = tuple(line.strip() for line in kept[-3:])
    return BuildFailure("unknown", "the build failed", "see the whole log", None, errors or last)


def _named(entry: Mapping[str, Any], evidence: list[str]) -> BuildFailure:
    return BuildFailure(entry["id"], entry["sentence"], entry.get("hint"), entry.get("retry"), tuple(evidence[:3]))


def _errors(lines: list[str]) -> tuple[str, ...]:
    """Return the first three errors, CMake's before others, which warnings may only mention.

    A "CMake Error" comes with the indented text below it, which is the message.
    """
    cmake, others = [], []
    for at, line in enumerate(lines):
        text = line.strip()
        if text.startswith("CMake Error"):
            cmake.append(" ".join([text, *_indented(lines[at + 1 : at + 1 + _MESSAGE_LINES])]))
        elif _FIRST_ERROR.search(line):
            others.append(text)
    return tuple([*cmake, *others][:3])


def _indented(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if line.strip() and not line.startswith(" "):
            return
        if line.strip():
            yield line.strip()
