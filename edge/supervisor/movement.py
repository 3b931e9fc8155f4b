"""Does anything move? Stall deadlines, never absolute ones: a slow load that moves is left alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from edge.linux.procfs import ProcessUsage
from edge.status import Failure

# Of one core. Our own /health polls cost an engine less; work of any kind costs more.
IDLE_CPU_RATIO = 0.03
CPU_STEP_S = 0.05  # the kernel counts in hundredths: less says nothing


@dataclass(slots=True)
class Stillness:
    """Fed with looks at a child; says for how long nothing has moved. Monotonic seconds.

    CPU time is counted since the last movement, so that it does not matter how often one looks.
    """

    moved_s: float
    _cpu_s: float | None = None
    _read: tuple[int, int] = (0, 0)
    _lines: int = 0

    def look(self, now_s: float, vitals: ProcessUsage | None, lines: int, *, excused: bool = False) -> float:
        """→ quiet seconds. `excused`: nothing is waited for, so nothing has to move."""
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
    return Failure("stalled", what, "is the disk answering? see `dmesg` and `edgellm doctor`")


def wedged(quiet_s: float) -> Failure:
    what = f"a request waits and nothing moved for {quiet_s:.0f} s: no token, no CPU time, no log line"
    return Failure("wedged", what, "it is restarted; if it happens again, update the engine or the driver")
