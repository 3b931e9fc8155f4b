"""Diagnose an engine's exit from its status, its last log lines and the kernel's evidence. Pure."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterable, Sequence

from msgspec import Struct

from edge.errors import EdgeError
from edge.supervisor.log_patterns import Patterns, Signature, parse_line
from edge.supervisor.policy import EngineFault
from edge.supervisor.process import ExitStatus
from edge.supervisor.status import Failure

TAIL_LINES = 12  # shown as evidence: what fits on a terminal beside the rest of the status
# An engine that served for days has old errors in its log; its cause is near the end, before a backtrace.
SERVING_LINES = 80
# SIGKILL comes from outside: only lines right before it can show its reason.
KILLED_LINES = 12
# Of fork(2) and pipe(2): the machine is short of processes, memory or descriptors now, and may not be later.
_PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class Death(Struct, frozen=True):
    """Everything known about one exit. `log`: the kept lines, oldest first.

    `oom_killed`: by the kernel's counters or log; `asked`: the supervisor sent the signal; `served`: it had been
    READY; `l4t`: release of a Jetson's system; `causes`: the lines that may explain the exit of a start, None where
    all of `log` may.
    """

    exit: ExitStatus
    log: Sequence[str] = ()
    oom_killed: bool = False
    asked: bool = False
    served: bool = False
    l4t: str | None = None
    causes: Sequence[str] | None = None


class Diagnosis(Struct, frozen=True):
    """The class of an exit, for the state machine, and its failure, for people."""

    fault: EngineFault
    failure: Failure


def diagnose(death: Death, patterns: Patterns) -> Diagnosis:
    """Return the cause of an exit: the kernel's evidence first, then a signature of the log, then signal or code.

    Takes up to a second for a long log: call it in a thread.
    """
    exit = death.exit
    evidence = "\n".join([str(exit), *(death.log[-TAIL_LINES:] or ["it printed nothing"])])
    killed = exit.signal == signal.SIGKILL
    if death.oom_killed and killed:
        hint = "the kernel killed it for memory: use a smaller context, quantization or model, or free memory"
        return Diagnosis(EngineFault.OOM, Failure("out_of_memory", evidence, hint))
    if signature := find_cause(_last_words(death, killed), patterns):
        # Once it has served, its log holds text of clients: it explains a crash, but takes no rung and ends no retry.
        fault = EngineFault.CRASH if death.served else _fault(signature)
        here = f" (this board runs L4T {death.l4t})" if fault is EngineFault.NVMAP and death.l4t else ""
        return Diagnosis(fault, Failure(signature.kind, evidence, signature.hint + here))
    if exit.signal is not None:
        return _by_signal(exit.signal, evidence, death)
    return _by_code(exit.code or 0, evidence, death.served)


def _last_words(death: Death, killed: bool) -> Sequence[str]:
    """Return the lines that may explain the exit.

    A serving engine that a signal ended is explained by them only if it called abort(3), as llama.cpp does for errors
    of its own: what stands in its log before a SIGSEGV or SIGKILL may be text of a client.
    """
    if death.served:
        return death.log[-SERVING_LINES:] if death.exit.signal in (None, signal.SIGABRT) else ()
    lines = death.log if death.causes is None else death.causes
    return lines[-KILLED_LINES:] if killed else lines


def find_cause(log: Iterable[str], patterns: Patterns) -> Signature | None:
    """Return the first signature in the table's order (special before general) that matches. `serves` is no cause.

    Line by line: a search holds Python's global lock, and the whole of a flooded log takes it 50 ms for each signature.
    """
    harmless = [signature.pattern for signature in patterns.signatures if signature.serves]
    own = [patterns.without_names(line) for line in dict.fromkeys(log) if not patterns.quotes(parse_line(line).text)]
    lines = [line for line in own if not any(pattern.search(line) for pattern in harmless)]
    for signature in patterns.signatures:
        if not signature.serves and any(signature.pattern.search(line) for line in lines):
            return signature
    return None


def _fault(signature: Signature) -> EngineFault:
    if signature.kind == "nvmap_refused":
        return EngineFault.NVMAP
    if signature.oom:
        return EngineFault.OOM
    if signature.device:
        return EngineFault.DEVICE
    return EngineFault.PERMANENT if signature.permanent else EngineFault.CRASH


def _by_signal(number: int, evidence: str, death: Death) -> Diagnosis:
    if death.asked:
        return Diagnosis(EngineFault.CRASH, Failure("hung", evidence, "it did not answer and was killed"))
    if number == signal.SIGKILL:
        hint = "probably the kernel, for memory (see `journalctl -k | grep -i oom`), or a kill -9 by a user"
        return Diagnosis(EngineFault.KILLED, Failure("killed", evidence, hint))
    if number == signal.SIGILL and not death.served:
        hint = "the engine uses instructions this processor lacks: build it here (`edgellm build`)"
        return Diagnosis(EngineFault.PERMANENT, Failure("wrong_cpu", evidence, hint))
    if number == signal.SIGSYS and not death.served:
        hint = "a system call filter ended it: look for SystemCallFilter= in drop-ins of the unit, or the container's"
        return Diagnosis(EngineFault.PERMANENT, Failure(signal_kind(number), evidence, hint))
    hint = "it crashed; it is started again. See `edgellm logs --engine`"
    if number == signal.SIGBUS:  # signal(7): a page behind the end of a mapped file, or one that cannot be read
        hint = "a mapped file became shorter, or its disk failed: see `edgellm model check` and `dmesg`"
    return Diagnosis(EngineFault.CRASH, Failure(signal_kind(number), evidence, hint))


def signal_kind(number: int) -> str:
    """Return a failure kind such as `signal_segv`; real-time signals have no name."""
    try:
        return f"signal_{signal.Signals(number).name.removeprefix('SIG').lower()}"
    except ValueError:
        return f"signal_{number}"


def _by_code(code: int, evidence: str, served: bool) -> Diagnosis:
    if code == 64 and not served:  # EX_USAGE of sysexits.h: the command line itself is refused
        hint = "the engine refuses its command line: see its last lines, `edgellm logs --engine`"
        return Diagnosis(EngineFault.PERMANENT, Failure("bad_flag", evidence, hint))
    if code in (126, 127) and not served:  # of a shell: not executable for this user or machine, not found
        hint = "a file the engine needs is missing: import it with its libraries or build it here"
        return Diagnosis(EngineFault.PERMANENT, Failure("install_fault", evidence, hint))
    hint = "see its last lines: `edgellm logs --engine`"
    return Diagnosis(EngineFault.CRASH, Failure("exited", evidence, hint))


def shot(failure: Failure | None) -> bool:
    """Return whether another process sent SIGKILL: no request is to blame."""
    return failure is not None and failure.kind == "killed"


def failed_spawn(error: EdgeError) -> Diagnosis:
    """Return the fault of an engine that could not be spawned or planned."""
    kind = "spawn_failed" if error.kind == "unavailable" else error.kind
    passes = isinstance(error.__cause__, OSError) and error.__cause__.errno in _PASSING
    failure = Failure(kind, str(error), error.hint or "see `edgellm doctor`")
    return Diagnosis(EngineFault.CRASH if passes else EngineFault.PERMANENT, failure)
