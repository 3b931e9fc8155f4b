"""The limits by which a supervisor waits, restarts and gives up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edge.config.values import RestartConfig


class Fault(Enum):
    """The class of an engine's exit; the state machine acts on it, not on the failure's kind."""

    PERMANENT = "permanent"  # a bad flag, a bad model, a missing library: the next start ends the same way
    OOM = "oom"  # evidence: allocator message, cgroup counter, kernel log
    NVMAP = "nvmap"  # Tegra's allocator refused although memory is free
    KILLED = "killed"  # SIGKILL without evidence of its sender
    DEVICE = "device"  # the GPU did not come up
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Policy(RestartConfig):
    """The [restart] section and the constants beside it. Seconds are monotonic."""

    # Boards on one power supply that all restart at the same moment would draw their peak currents together.
    jitter: float = 0.1
    # Other processes need time to exit or to drop a model (FC-25): three looks within about a minute.
    allocation_pauses_s: tuple[float, ...] = (5, 15, 45)
    # How often liveness is judged while a request or a load is pending: a sixtieth of stall_s and wedge_s.
    look_s: float = 1.0
    # Requests that waited for READY arrive within milliseconds of it; the idle set must not be ahead of them.
    idle_before_s: float = 0.5
    # All of the idle warm-up: a client that comes in the middle waits at most for one of its prompts.
    idle_set_s: float = 3.0
    # A slow measurement is repeated once: another process may have disturbed the first.
    second_look_s: float = 10.0
    cpu_rung: int | None = None  # where `fallback = "cpu"` leads when the GPU stays absent

    @property
    def wedge_again_s(self) -> float:
        """After a first wedge the next one is assumed sooner: the engine has shown that it does not recover."""
        return self.wedge_s / 2

    def backoff(self, crashes: int, jitter: float) -> float:
        """Return the pause before try number `crashes` + 1. `jitter`: a random number, 0…1."""
        pause = self.backoff_s[min(max(crashes, 1), len(self.backoff_s)) - 1]
        return pause * (1 + self.jitter * jitter)
