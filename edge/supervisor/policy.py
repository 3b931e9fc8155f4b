"""The limits by which a supervisor waits, restarts and gives up. Pure."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct, field

from edge.config.values import RestartConfig
from edge.supervisor.process import ProcessLimits
from edge.supervisor.status import Degraded


class EngineFault(Enum):
    """The class of an engine's exit; the state machine acts on it, not on the failure's kind."""

    PERMANENT = "permanent"  # a bad flag, a bad model, a missing library: the next start ends the same way
    OOM = "oom"  # evidence: allocator message, cgroup counter, kernel log
    NVMAP = "nvmap"  # Tegra's allocator refused although memory is free
    KILLED = "killed"  # SIGKILL without evidence of its sender
    DEVICE = "device"  # the GPU did not come up
    CRASH = "crash"


class Policy(RestartConfig, frozen=True):
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
    # Starts that fail the same way, with no remedy left: with the pauses of backoff_s the eighth comes after a minute.
    start_tries: int = 8
    # A stall takes stall_s each: the third in a row is no disk that was late.
    stall_tries: int = 3
    # Failed starts of any kind in a row, so that causes that alternate end too.
    start_limit: int = 24
    # READY time on a rung below the planned one, taken for memory in a request, before the planned one is tried again.
    rung_back_s: float = 300.0
    # A person's pause between two messages: a shorter one would write each turn of a conversation to flash.
    save_prompts_idle_s: float = 60.0
    cpu_rung: int | None = None  # where `fallback = "cpu"` leads when the GPU stays absent

    @property
    def wedge_again_s(self) -> float:
        """Return the seconds to a second wedge, fewer than to the first: this engine has not recovered once."""
        return self.wedge_s / 2

    def backoff(self, crashes: int, jitter: float) -> float:
        """Return the pause before try number `crashes` + 1. `jitter`: a random number, 0…1."""
        pause = self.backoff_s[min(max(crashes, 1), len(self.backoff_s)) - 1]
        return pause * (1 + self.jitter * jitter)


# Options that hold for every child of one model. Values only.


class ExpectedSpeed(Struct, frozen=True):
    """The speed that a model should reach on this board. `source` names where the number comes from."""

    tokens_s: float
    source: str


class SupervisorOptions(Struct, frozen=True):
    """The options of one supervisor, from the configuration, the profile and the board."""

    policy: Policy = field(default_factory=Policy)
    limits: ProcessLimits = ProcessLimits()
    strict: bool = False  # refuse to serve with any Degraded
    capability: str | None = None  # of the GPU: "8.7"
    l4t: str | None = None  # release of a Jetson's system: "36.4.7"
    system_prompt: str = ""
    warmup_tokens: tuple[int, ...] = ()  # prompt lengths of the idle warm-up
    expected_speed: ExpectedSpeed | None = None
    preload: bool = True  # False: sleep until the first request
    ttl_s: float = 0.0  # idle seconds until it sleeps; 0 is never
    known: tuple[Degraded, ...] = ()  # differences from the request that are known before the start
