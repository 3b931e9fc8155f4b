"""Judge by bytes, CPU time and its own counters whether an engine makes progress; total time does not count. Pure."""

from __future__ import annotations

import math

from msgspec import Struct

from edge.linux.procfs import ProcessUsage
from edge.supervisor.status import Failure
from edge.units import GIB, KIB, format_bytes

# Share of one core. An idle engine that answers /health once a second uses less; any work uses more.
IDLE_CPU_RATIO = 0.03
CPU_STEP_S = 0.05  # /proc/PID/stat counts in ticks of 10 ms: five of them are no rounding error


# A chat template is rendered in milliseconds and some MiB, before the engine answers. One that does not end computes.
TEMPLATE_S, TEMPLATE_BYTES = 300.0, GIB
# Any other stage that only computes: kernels that the driver compiles at the first start took minutes on a board.
COMPUTES_S = 3600.0
READ_STEP_BYTES = 64 * KIB  # a thread that waits may read some bytes; a model is read in blocks


class StallDetector(Struct):
    """Measures for how long a child has made no progress. Times are monotonic seconds.

    CPU time counts since the last progress, so that the interval between looks does not matter. `work`: any number or
    text of the engine's own that changes with its progress (log lines, slots). Where looks are more than `apart_s`
    apart, this process itself stood still (SIGSTOP, a paused container): that time shows nothing of the child.
    """

    moved_s: float
    apart_s: float = math.inf
    _looked_s: float | None = None
    _cpu_s: float | None = None
    _read: tuple[int, int] = (0, 0)
    _work: object = 0
    _shown_s: float = 0.0  # when a line or a block of bytes last came; CPU time alone is neither
    _shown: tuple[int, object] = (0, None)
    _loaded_bytes: int | None = None  # memory at the first look after the models were loaded

    def look(self, now_s: float, vitals: ProcessUsage | None, work: object, *, excused: bool = False) -> float:
        """Return the seconds without progress. `excused`: nothing is pending, so none is expected."""
        gap_s = now_s - (now_s if self._looked_s is None else self._looked_s)
        if gap_s > self.apart_s:
            self.moved_s, self._shown_s = self.moved_s + gap_s, self._shown_s + gap_s
        self._looked_s = now_s
        read = sum(_read(vitals)) if vitals is not None else self._shown[0]
        if excused or work != self._shown[1] or read - self._shown[0] >= READ_STEP_BYTES:
            self._shown_s, self._shown = now_s, (read, work)
        if excused or self._has_moved(now_s, vitals, work):
            self.moved_s, self._work = now_s, work
            if vitals is not None:
                self._cpu_s, self._read = vitals.cpu_s, _read(vitals)
        return now_s - self.moved_s

    def _has_moved(self, now_s: float, vitals: ProcessUsage | None, work: object) -> bool:
        if work != self._work:
            return True
        if vitals is None:
            return False
        if self._cpu_s is None or _read(vitals) != self._read:
            return True
        return vitals.cpu_s - self._cpu_s > max(CPU_STEP_S, IDLE_CPU_RATIO * (now_s - self.moved_s))

    def endless(
        self, now_s: float, vitals: ProcessUsage | None, *, loaded: bool, drafts: bool = False
    ) -> Failure | None:
        """Return the failure of a start that only computes, or takes memory once its models are `loaded`.

        `drafts`: it may have a drafter, whose context, with a KV cache, builds of 2025 allocate only then.
        """
        shown_s = now_s - self._shown_s
        if not loaded or vitals is None:
            return computes(shown_s) if shown_s >= COMPUTES_S else None
        taken = vitals.rss_anon_bytes + vitals.swap_bytes
        if self._loaded_bytes is None:
            self._loaded_bytes = taken
        if not drafts and taken - self._loaded_bytes >= TEMPLATE_BYTES:
            return of_template(f"it took {format_bytes(taken - self._loaded_bytes)} more")
        return (
            of_template(f"no log line and no byte for {shown_s:.0f} s, only CPU time,")
            if shown_s >= TEMPLATE_S
            else None
        )


def _read(vitals: ProcessUsage) -> tuple[int, int]:
    return vitals.called_bytes, vitals.disk_bytes


# A GPU that is busy for this many limits without any other progress hangs in a kernel: the driver's own watchdog is off
# for compute on Jetson and on servers.
BUSY_LIMITS = 10
BUSY_RATIO = 0.05  # of the GPU's load; a desktop on the same GPU stays below it


def busy_excuses(gpu_load: float | None, quiet_s: float, limit_s: float) -> bool:
    """Return whether the GPU's load (0…1, None unknown) shows work although nothing else moves."""
    return gpu_load is not None and gpu_load >= BUSY_RATIO and quiet_s < BUSY_LIMITS * limit_s


def slots_work(document: object) -> str | None:
    """Return the counters of the slots that work, as text to compare; None where /slots has no usable answer."""
    if not isinstance(document, list):
        return None
    working = [slot for slot in document if isinstance(slot, dict) and slot.get("is_processing")]
    return repr([sorted((key, value) for key, value in slot.items() if key in _COUNTERS) for slot in working])


# /slots of llama-server: processed and generated tokens of a slot, by the names of its eras.
_COUNTERS = {"id_task", "n_past", "n_decoded", "n_prompt_tokens_processed", "next_token", "n_tokens_predicted"}


def stalled(quiet_s: float) -> Failure:
    """Return the failure of an engine that makes no progress while it loads."""
    what = f"no log line, byte or CPU time for {quiet_s:.0f} s while the model loads"
    return Failure("stalled", what, "check the disk: `dmesg` and `edgellm doctor`")


def computes(shown_s: float) -> Failure:
    """Return the failure of an engine that computes without end while it loads."""
    what = f"no log line and no byte for {shown_s:.0f} s while the model loads, only CPU time"
    return Failure("stalled", what, "see `edgellm logs --engine` for the last stage, and try another file of the model")


def of_template(what: str) -> Failure:
    """Return the failure of an engine that does not end a chat template. That it is the template is probable only."""
    hint = "see `edgellm model check`; chat_template_file takes another template, or take another file of the model"
    return Failure(
        "template_endless", f"{what} after the model was loaded: probably its chat template has no end", hint
    )


def wedged(quiet_s: float) -> Failure:
    """Return the failure of an engine that makes no progress with an open request."""
    what = f"a request waits and nothing moved for {quiet_s:.0f} s: no byte, no CPU or GPU time, no slot that counts"
    return Failure("wedged", what, "it is restarted; if it happens again, update the engine or the driver")


def foreign(pid: int) -> Failure:
    """Return the failure of a socket that another process answers."""
    what = f"the engine's socket is answered by process {pid}, which is not the engine that was started"
    return Failure("socket_busy", what, "an engine of a former start may still run: end it, then restart")


def remote_lost(evidence: str) -> Failure:
    """Return the failure of an engine whose rpc-server went away."""
    return Failure("remote_lost", evidence, "see `edgellm rpc serve` there: its power, its cable, its log")
