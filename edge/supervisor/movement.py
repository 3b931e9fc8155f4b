"""Does anything move? Stall deadlines, never absolute ones: a slow load that moves is left alone."""

from __future__ import annotations

from dataclasses import dataclass

from edge.status import Failure
from edge.supervisor.vitals import Vitals

# Of one core. Our own /health polls cost an engine less; work of any kind costs more.
IDLE_CPU_RATIO = 0.02


@dataclass(slots=True)
class Stillness:
    """Fed with looks at a child; says for how long nothing has moved. Monotonic seconds."""

    moved_s: float
    _at_s: float | None = None
    _cpu_s: float = 0.0
    _read: tuple[int, int] = (0, 0)
    _lines: int = 0

    def look(self, now_s: float, vitals: Vitals | None, lines: int, *, excused: bool = False) -> float:
        """→ quiet seconds. `excused`: nothing is waited for, so nothing has to move."""
        if excused or self._at_s is None or self._has_moved(now_s, vitals, lines):
            self.moved_s = now_s
        self._at_s, self._lines = now_s, lines
        if vitals is not None:
            self._cpu_s, self._read = vitals.cpu_s, (vitals.called_bytes, vitals.disk_bytes)
        return now_s - self.moved_s

    def _has_moved(self, now_s: float, vitals: Vitals | None, lines: int) -> bool:
        if lines != self._lines:
            return True
        if vitals is None or self._at_s is None:
            return False
        busy_s = vitals.cpu_s - self._cpu_s
        read = (vitals.called_bytes, vitals.disk_bytes) != self._read
        return read or busy_s > IDLE_CPU_RATIO * (now_s - self._at_s)


def stalled(quiet_s: float) -> Failure:
    what = f"no log line, byte or CPU time for {quiet_s:.0f} s while loading"
    return Failure("stalled", what, "is the disk answering? see `dmesg` and `edgellm doctor`")


def wedged(quiet_s: float) -> Failure:
    what = f"a request waits and nothing moved for {quiet_s:.0f} s: no token, no CPU time, no log line"
    return Failure("wedged", what, "it is restarted; if it happens again, update the engine or the driver")
