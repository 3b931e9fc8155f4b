"""When to wait, when to try again, when to give up. Values and pure functions; every number has its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """What kind of end a child met; the machine decides by it."""

    PERMANENT = "permanent"  # a bad flag, a bad model, a missing library: the next try ends the same way
    OOM = "oom"  # evidence: allocator marker, cgroup counter, kernel log
    NVMAP = "nvmap"  # Tegra's allocator refused although memory is there
    KILLED = "killed"  # SIGKILL without evidence of who sent it
    DEVICE = "device"  # the GPU did not come up
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds are monotonic."""

    backoff_s: tuple[float, ...] = (0, 1, 2, 4, 8, 16, 32, 60)  # at once the first time: most crashes are single
    jitter: float = 0.1  # boards that share a power supply must not restart in step
    stable_s: float = 60  # as long as the longest pause: a child that lived so long was no crash loop
    allocation_pauses_s: tuple[float, ...] = (5, 15, 45)  # other users need time to let go (FC-25)
    device_attempts: int = 3  # the driver of a cold board came up within three tries in every report (FC-74)
    stall_s: float = 60  # no log line, byte or CPU time: nothing that loads is this quiet
    look_s: float = 1.0  # how often movement is judged while something is waited for: a sixtieth of the limits
    wedge_s: float = 60  # a prompt that is being worked on burns CPU or GPU submit time
    wedge_again_s: float = 30  # once seen, believed sooner
    drain_s: float = 30  # a long answer may finish; a plug that is pulled will not wait longer
    term_s: float = 10  # llama-server frees GPU memory in about a second
    idle_before_s: float = 0.5  # whoever waited for READY asks now
    idle_set_s: float = 3.0  # all idle warm-up together
    second_look_s: float = 10.0  # what was slow may only have been disturbed
    cpu_rung: int | None = None  # where `fallback = "cpu"` leads when the GPU stays away

    def backoff(self, crashes: int, luck: float) -> float:
        """Pause before try number `crashes` + 1; `luck` is 0…1."""
        pause = self.backoff_s[min(max(crashes, 1), len(self.backoff_s)) - 1]
        return pause * (1 + self.jitter * luck)
