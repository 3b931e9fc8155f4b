"""The exit status of a process. A value."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """An exit by `code` or by `signal`. `lived_s`: from spawn to exit."""

    code: int | None
    signal: int | None
    lived_s: float

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code} after {self.lived_s:.1f} s"
        known = self.signal in {number.value for number in signals.Signals}
        name = signals.Signals(self.signal).name if known else str(self.signal)
        return f"signal {name} after {self.lived_s:.1f} s"
