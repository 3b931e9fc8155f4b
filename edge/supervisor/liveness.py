"""Judge by vitals and log lines whether an engine makes progress. Stalls count, not total time. Pure."""

from __future__ import annotations

from msgspec import Struct

from edge.linux.procfs import ProcessUsage
from edge.supervisor.status import Failure

# Share of one core. An idle engine that answers /health once a second uses less; any work uses more.
IDLE_CPU_RATIO = 0.03
CPU_STEP_S = 0.05  # /proc/PID/stat counts in ticks of 10 ms: five of them are no rounding error


class StallDetector(Struct):
    """Measures for how long a child has made no progress. Times are monotonic seconds.

    CPU time counts since the last progress, so that the interval between looks does not matter.
    """

    moved_s: float
    _cpu_s: float | None = None
    _read: tuple[int, int] = (0, 0)
    _lines: int = 0

    def look(self, now_s: float, vitals: ProcessUsage | None, lines: int, *, excused: bool = False) -> float:
        """Return the seconds without progress. `excused`: nothing is pending, so none is expected."""
        if excused or self._has_moved(now_s, vitals, lines):
            self.moved_s, self._lines = now_s, lines
            if vitals is not None:
                self._cpu_s, self._read = vitals.cpu_s, _read(vitals)
        return now_s - self.moved_s

    def _has_moved(self, now_s: float, vitals: ProcessUsage | None, lines: int) -> bool:
        if lines != self._lines:
            return True
        if vitals is None:
            return False
        if self._cpu_s is None or _read(vitals) != self._read:
            return True
        return vitals.cpu_s - self._cpu_s > max(CPU_STEP_S, IDLE_CPU_RATIO * (now_s - self.moved_s))


def _read(vitals: ProcessUsage) -> tuple[int, int]:
    return vitals.called_bytes, vitals.disk_bytes


def stalled(quiet_s: float) -> Failure:
    what = f"no log line, byte or CPU time for {quiet_s:.0f} s while loading"
    return Failure("stalled", what, "check the disk: `dmesg` and `edgellm doctor`")


def wedged(quiet_s: float) -> Failure:
    what = f"a request waits and nothing moved for {quiet_s:.0f} s: no token, no CPU time, no log line"
    return Failure("wedged", what, "it is restarted; if it happens again, update the engine or the driver")
