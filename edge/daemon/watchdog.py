"""Report to systemd: STATUS with gate and progress, and WATCHDOG=1 only while every supervised loop turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from edge.linux.sd_notify import Notifier
from edge.supervisor.status import ModelStatus, State
from edge.units import printable

RISING = frozenset({State.STARTING, State.LOADING, State.WARMING})
MORE_S = 60.0  # EXTEND_TIMEOUT_USEC of a load that made progress
LOOK_RISING_S = 0.5
BEATS_PER_WATCHDOG = 4  # sd_watchdog_enabled(3) recommends half the interval; a quarter survives one late beat
BEAT_S = 10.0  # without WatchdogSec= only /livez needs it


class Loop(Protocol):
    """A loop that is checked: `ping()` makes it iterate once more, `iterations` counts."""

    @property
    def iterations(self) -> int: ...

    def ping(self) -> None: ...


class Watchdog:
    """Status and keep-alive messages of one process. `alive` is true while every watched loop turns."""

    def __init__(self, notifier: Notifier, statuses: Callable[[], Sequence[ModelStatus]]) -> None:
        self.alive = True
        self._notifier = notifier
        self._statuses = statuses
        self._loops: list[Loop] = []
        self._seen: dict[int, int] = {}
        self._sent = ""
        self._moved: tuple[object, ...] = ()

    def watch(self, loops: Iterable[Loop]) -> None:
        """Replace the loops that have to turn."""
        self._loops = list(loops)

    async def run(self) -> None:
        """Send beats and status until cancelled."""
        beat_s = self._notifier.watchdog_s / BEATS_PER_WATCHDOG if self._notifier.watchdog_s else BEAT_S
        loop = asyncio.get_running_loop()
        next_beat_s = loop.time()
        while True:
            now_s = loop.time()
            if now_s >= next_beat_s:
                self.beat()
                next_beat_s = now_s + beat_s
            rising = self.notify()
            wait_s = next_beat_s - now_s
            await asyncio.sleep(min(wait_s, LOOK_RISING_S) if rising and self._notifier.heard else wait_s)

    def beat(self) -> None:
        """Send WATCHDOG=1 if each loop has turned since the last beat; that this runs proves the event loop itself."""
        self.alive = all(each.iterations != self._seen.get(id(each)) for each in self._loops)
        self._seen = {id(each): each.iterations for each in self._loops}
        for each in self._loops:
            each.ping()
        if self.alive:
            self._notifier.alive()

    def notify(self) -> bool:
        """Send a changed status, with more time while a load moves. Return whether a model is starting."""
        statuses = self._statuses()
        text = describe(statuses)
        moved = tuple((each.state, each.progress, tuple(g.ready for g in each.gates.values())) for each in statuses)
        rising = any(each.state in RISING for each in statuses)
        if text != self._sent or (rising and moved != self._moved):
            self._notifier.status(text, more_s=MORE_S if rising else None)
        self._sent, self._moved = text, moved
        return rising


def describe(statuses: Iterable[ModelStatus]) -> str:
    """Format `chat: weights 63 %; embed: ready`, for `systemctl status`, which sends it to the terminal as it is."""
    return printable("; ".join(f"{status.id}: {_one(status)}" for status in statuses)) or "no model"


def _one(status: ModelStatus) -> str:
    if status.state is State.READY:
        worse = ", ".join(f"{item.subject} {item.got} instead of {item.wanted}" for item in status.degraded)
        return f"ready, degraded: {worse}" if worse else "ready"
    if status.state in RISING:
        gate = next((name for name, gate in status.gates.items() if not gate.ready), "warm")
        known = gate == "weights" and status.progress is not None
        return f"weights {(status.progress or 0) * 100:.0f} %" if known else gate
    if status.state is State.FAILED and status.failure is not None:
        return f"failed: {status.failure.kind}; {status.failure.hint}"
    if status.state is State.STOPPED and status.failure is not None:
        return f"stopped: {status.failure.kind}"
    if status.state is State.BACKOFF and status.failure is not None:
        return f"restarts after {status.failure.kind}"
    word: str = status.state.value
    return word.lower()
