"""Watches one child from spawn to burial and tells the owner what happened. Decides nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from edge.linux.procfs import read_usage
from edge.status import Degraded, Failure
from edge.supervisor.attempt import Attempt, Sighting
from edge.supervisor.child import Child
from edge.supervisor.diagnose import Death, diagnose
from edge.supervisor.events import (
    DeviceMissing,
    EngineLoading,
    EngineReady,
    Event,
    Exited,
    Hung,
    Refused,
    Sleep,
    Warmed,
)
from edge.supervisor.exitwatch import gone, reaped
from edge.supervisor.lines import read_lines
from edge.supervisor.memorywatch import grown
from edge.supervisor.movement import Stillness, stalled, wedged
from edge.supervisor.oom import OomWitness
from edge.supervisor.patterns import Patterns
from edge.supervisor.probe import Probe
from edge.supervisor.terms import Terms
from edge.supervisor.traffic import Traffic
from edge.supervisor.truth import differences
from edge.supervisor.warming import ConnectionLost, Warming
from edge.waits import Late, happens, within

HEALTH_POLL_S = 0.1  # until the engine says "ready" itself; then it is asked at once
SAID_POLL_S = 0.002  # said, not yet true: the two are milliseconds apart
HEALTH_POLL_MOST_S = 1.0  # our questions must not look like its work
HEALTH_POLL_GROWTH = 1.15
IDLE_LOOK_S = 10.0  # how often memory is looked at while nobody asks
PIPES_END_S = 0.2  # a dead child's last lines are in the pipe already
DEATH_S = 10.0  # from a broken connection to the end of a process that writes a core


class Watch:
    """One child. `post` takes the machine's events; `on_line` sees each log line; `before` are known differences."""

    def __init__(
        self,
        child: Child,
        attempt: Attempt,
        patterns: Patterns,
        terms: Terms,
        *,
        post: Callable[[Event], None],
        on_line: Callable[[str], None],
        traffic: Traffic,
        chat_template: bool,
        before: Sequence[Degraded] = (),
        wedge_s: float | None = None,
        on_speed: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.child = child
        self.attempt = attempt
        self.engine_ready_s: float | None = None
        self.first_token_s: float | None = None
        self.asked = False  # we sent a signal ourselves
        self._patterns = patterns
        self._terms = terms
        self._post = post
        self._on_line = on_line
        self._traffic = traffic
        self._on_speed = on_speed
        self._before = tuple(before)
        self._differences: tuple[Degraded, ...] = ()
        self._memory: tuple[Degraded, ...] = ()
        self._wedge_s = terms.policy.wedge_s if wedge_s is None else wedge_s
        self._probe = Probe(child.socket_path)
        self.warming = Warming(self._probe, attempt.plan.settings, chat_template, terms)
        self._says_ready = asyncio.Event()
        self._buried = asyncio.Event()
        self._witness = OomWitness(child.pid, child.spawned_at_s)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def degraded(self) -> tuple[Degraded, ...]:
        return (*self._before, *self._differences, *self._memory, *self.warming.slow)

    def start(self) -> None:
        for work in (self._bury(), self._ask_health(), self._watch_movement()):
            self._begin(work)

    def warm_up(self) -> None:
        self._begin(self._warm())

    async def close(self) -> None:
        """Ends the watching; the child must be gone or going."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._probe.close()
        self.child.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failure = Failure("bug", f"{type(error).__name__}: {error}", "please report this")
            self._post(Hung(failure))

    # --- what the child says -----------------------------------------------------------------------------------------

    def _saw(self, sightings: Sequence[Sighting]) -> None:
        for sighting in sightings:
            if sighting.what == "loading":
                self._post(EngineLoading())
            elif sighting.what == "ready":
                self._says_ready.set()
            elif sighting.missing is not None:
                missing = sighting.missing
                failure = Failure(missing.kind, self.attempt.tail[-1] if self.attempt.tail else "", missing.hint)
                self._post(DeviceMissing(failure, missing.permanent))

    def _stderr(self, raw: str) -> None:
        self._on_line(raw)
        self._saw(self.attempt.stderr(raw, time.monotonic()))

    def _stdout(self, raw: str) -> None:
        self._saw(self.attempt.stdout(raw, time.monotonic()))

    # --- its end -----------------------------------------------------------------------------------------------------

    async def _bury(self) -> None:
        errors, error_lines = await read_lines(self.child.stderr, self._stderr)
        outputs, output_lines = await read_lines(self.child.stdout, self._stdout)
        try:
            await gone(self.child.pid)
            with suppress(Late):
                await within(asyncio.gather(error_lines.ended.wait(), output_lines.ended.wait()), PIPES_END_S)
        finally:
            errors.close()
            outputs.close()
        status = await reaped(self.child)
        # The kernel kills by SIGKILL only, and a kill that we sent ourselves is no evidence of anything.
        oom_killed = status.signal == signal.SIGKILL and not self.asked and self._witness.killed()
        told_by = (status, list(self.attempt.tail), oom_killed, self.asked, self.attempt.served)
        death = Death(*told_by, self._terms.l4t)
        told = diagnose(death, self._patterns)
        self._buried.set()
        self._post(Exited(told.fault, told.failure, random.random()))

    # --- its readiness -----------------------------------------------------------------------------------------------

    async def _ask_health(self) -> None:
        pause_s, said = HEALTH_POLL_S, False
        while await self._probe.health() != 200:
            if not said and self._says_ready.is_set():
                said, pause_s = True, SAID_POLL_S
            if said:
                await asyncio.sleep(pause_s)
            else:
                await happens(self._says_ready, pause_s)
            pause_s = min(pause_s * HEALTH_POLL_GROWTH, HEALTH_POLL_MOST_S)
        self.engine_ready_s = time.monotonic()
        vitals = read_usage(self.child.pid)
        self._saw(self.attempt.answered(self.engine_ready_s, vitals.rss_bytes if vitals else None))
        self._post(EngineReady())

    async def _warm(self) -> None:
        props = await self._probe.get("/props")
        self._differences = differences(self.attempt.plan, self.attempt.facts, props)
        if self._terms.strict and self.degraded:
            self._post(Refused(_strict(self.degraded[0])))
            return
        try:
            failure = await self.warming.first()
        except ConnectionLost as lost:
            # It died in its first decode: the exit tells why. Only one that lives on is told of here.
            if await happens(self._buried, DEATH_S):
                return
            failure = Failure("warm_up_failed", f"the connection broke: {lost}", "see `edgellm logs --engine`")
        if failure is not None:
            self._post(Hung(failure))
            return
        self.first_token_s = time.monotonic()
        self.attempt.warmed(self.first_token_s, "a completion came back")
        self._post(Warmed())
        await self.warming.idle(self._traffic)
        if self.warming.tokens_s is not None:
            self._on_speed(self.warming.tokens_s)

    # --- its movement ------------------------------------------------------------------------------------------------

    async def _watch_movement(self) -> None:
        """Rising: any line, byte or CPU time. Serving: only while a request is open; idle is no hang."""
        stillness = Stillness(time.monotonic())
        while True:
            serving = self.first_token_s is not None
            if serving and not self._traffic.open:
                await happens(self._traffic.opened, self._idle_look_s())
            else:
                await asyncio.sleep(self._terms.policy.look_s)
            vitals, now = read_usage(self.child.pid), time.monotonic()
            idle = serving and not self._traffic.open
            quiet_s = stillness.look(now, vitals, self.attempt.lines, excused=idle)
            if serving:
                self._memory = grown(self.attempt.plan, vitals)
                quiet_s = min(quiet_s, now - self._traffic.moved_s)
            elif vitals is not None:
                self.attempt.bytes_read(vitals.read_bytes)
            if idle and vitals is not None:
                self._witness.alive()
            if idle and self._terms.ttl_s and self._idle_s(now) >= self._terms.ttl_s:
                self._post(Sleep())
            if quiet_s >= (self._wedge_s if serving else self._terms.policy.stall_s):
                self._post(Hung(wedged(quiet_s) if serving else stalled(quiet_s)))
                return

    def _idle_s(self, now: float) -> float:
        return now - max(self._traffic.moved_s, self.first_token_s or now)

    def _idle_look_s(self) -> float:
        if not self._terms.ttl_s:
            return IDLE_LOOK_S
        left_s = self._terms.ttl_s - self._idle_s(time.monotonic())
        return min(IDLE_LOOK_S, max(self._terms.policy.look_s, left_s))


def _strict(first: Degraded) -> Failure:
    what = f"{first.subject}: wanted {first.wanted}, got {first.got} ({first.because})"
    return Failure("degraded", what, "strict = true refuses to serve this; see `edgellm plan`")
