"""Why an engine died: exit status + log tail + evidence of the kernel → Failure and Fault. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from edge.status import Failure
from edge.supervisor.exit import ExitStatus
from edge.supervisor.patterns import Patterns, Signature
from edge.supervisor.policy import Fault

TAIL_LINES = 12  # what a person reads before scrolling


@dataclass(frozen=True, slots=True)
class Diagnosis:
    fault: Fault
    failure: Failure


def diagnose(exit: ExitStatus, log: Sequence[str], patterns: Patterns, *, oom_killed: bool, asked: bool) -> Diagnosis:
    """`log`: the kept tail, oldest first; `oom_killed`: the kernel's word; `asked`: we sent the signal ourselves."""
    evidence = "\n".join([str(exit), *log[-TAIL_LINES:]])
    if oom_killed:
        hint = "the kernel killed it for memory: use a smaller context, quantization or model, or free memory"
        return Diagnosis(Fault.OOM, Failure("out_of_memory", evidence, hint))
    if signature := _cause(log, patterns):
        return Diagnosis(_fault(signature), Failure(signature.kind, evidence, signature.hint))
    if exit.signal is not None:
        return _by_signal(signal.Signals(exit.signal), evidence, asked)
    return _by_code(exit.code or 0, evidence)


def _cause(log: Sequence[str], patterns: Patterns) -> Signature | None:
    """Special before general: the table's order counts, not the line's. What `serves` only explains, never kills."""
    text = "\n".join(log)
    for signature in patterns.signatures:
        if not signature.serves and signature.pattern.search(text):
            return signature
    return None


def _fault(signature: Signature) -> Fault:
    if signature.kind == "nvmap_refused":
        return Fault.NVMAP
    if signature.oom:
        return Fault.OOM
    return Fault.PERMANENT if signature.permanent else Fault.CRASH


def _by_signal(number: signal.Signals, evidence: str, asked: bool) -> Diagnosis:
    if number is signal.SIGKILL and not asked:
        hint = "probably the kernel, for memory (see `journalctl -k | grep -i oom`), or somebody's kill -9"
        return Diagnosis(Fault.KILLED, Failure("killed", evidence, hint))
    if number is signal.SIGILL:
        hint = "the engine uses instructions this processor lacks: build it here (`edgellm build`)"
        return Diagnosis(Fault.PERMANENT, Failure("wrong_cpu", evidence, hint))
    kind = "hung" if asked else f"signal_{number.name.removeprefix('SIG').lower()}"
    hint = (
        "it did not answer and was ended" if asked else "it crashed; it is started again. See `edgellm logs --engine`"
    )
    return Diagnosis(Fault.CRASH, Failure(kind, evidence, hint))


def _by_code(code: int, evidence: str) -> Diagnosis:
    if code == 127:
        hint = "a file the engine needs is missing: import it with its libraries or build it here"
        return Diagnosis(Fault.PERMANENT, Failure("install_fault", evidence, hint))
    hint = "see its last lines: `edgellm logs --engine`"
    return Diagnosis(Fault.CRASH, Failure("exited", evidence, hint))
