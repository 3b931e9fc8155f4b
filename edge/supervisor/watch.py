"""Watches one child from spawn to burial and tells the owner what happened. Decides nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from edge.status import Degraded, Failure
from edge.supervisor import warmup
from edge.supervisor.attempt import Attempt, Sighting
from edge.supervisor.child import Child
from edge.supervisor.diagnose import diagnose
from edge.supervisor.events import DeviceMissing, EngineLoading, EngineReady, Event, Exited, Hung, Refused, Warmed
from edge.supervisor.exitwatch import gone
from edge.supervisor.lines import read_lines
from edge.supervisor.oom import kernel_log_names, oom_kills
from edge.supervisor.patterns import Patterns
from edge.supervisor.policy import Policy
from edge.supervisor.probe import Probe
from edge.supervisor.truth import differences
from edge.supervisor.vitals import read_vitals

HEALTH_POLL_S = 0.1  # until the engine says "ready" itself; then it is asked at once
LOOK_S = 1.0  # how often movement is judged: a sixtieth of the shortest limit
PIPES_END_S = 0.2  # a dead child's last lines are in the pipe already


@dataclass
class Traffic:
    """Requests that are open on the child now, and when the last byte of an answer moved (monotonic seconds)."""

    open: int = 0
    moved_s: float = 0.0


class Watch:
    """One child. `post` takes the machine's events; `on_line` sees each log line."""

    def __init__(
        self,
        child: Child,
        attempt: Attempt,
        policy: Policy,
        patterns: Patterns,
        *,
        post: Callable[[Event], None],
        on_line: Callable[[str], None],
        traffic: Traffic,
        role: str,
        chat_template: bool,
        strict: bool,
        api_key: str | None = None,
    ) -> None:
        self.child = child
        self.attempt = attempt
        self.degraded: tuple[Degraded, ...] = ()
        self.engine_ready_s: float | None = None
        self.first_token_s: float | None = None
        self.asked = False  # we sent a signal ourselves
        self._policy = policy
        self._patterns = patterns
        self._post = post
        self._on_line = on_line
        self._traffic = traffic
        self._role = role
        self._chat_template = chat_template
        self._strict = strict
        self._probe = Probe(child.socket_path, api_key)
        self._says_ready = asyncio.Event()
        self._oom_kills = oom_kills(child.pid)
        self._tasks: set[asyncio.Task[None]] = set()

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
            elif sighting.what == "no_device" and sighting.signature is not None:
                signature = sighting.signature
                self._post(DeviceMissing(Failure(signature.kind, self._last_line(), signature.hint)))

    def _last_line(self) -> str:
        return self.attempt.tail[-1] if self.attempt.tail else ""

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
            with suppress(asyncio.TimeoutError):
                ends = asyncio.gather(error_lines.ended.wait(), output_lines.ended.wait())
                await asyncio.wait_for(ends, PIPES_END_S)
        finally:
            errors.close()
            outputs.close()
        killed = self._killed_for_memory()
        status = self.child.poll()
        while status is None:  # the pidfd is readable a moment before the zombie can be reaped
            await asyncio.sleep(0.001)
            status = self.child.poll()
        told = diagnose(status, list(self.attempt.tail), self._patterns, oom_killed=killed, asked=self.asked)
        self._post(Exited(told.fault, told.failure, random.random()))

    def _killed_for_memory(self) -> bool:
        """Read while the zombie still has its cgroup; a kill that we sent ourselves is no evidence."""
        if self.asked:
            return False
        now = oom_kills(self.child.pid)
        if now is not None and self._oom_kills is not None and now > self._oom_kills:
            return True
        return kernel_log_names(self.child.pid)

    # --- its readiness -----------------------------------------------------------------------------------------------

    async def _ask_health(self) -> None:
        while True:
            if await self._probe.health() == 200:
                break
            if self._says_ready.is_set():  # said, not yet true: the two are milliseconds apart
                await asyncio.sleep(0.002)
                continue
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._says_ready.wait(), HEALTH_POLL_S)
        self.engine_ready_s = time.monotonic()
        self.attempt.answered(self.engine_ready_s)
        self._post(EngineReady())

    async def _warm(self) -> None:
        props = await self._probe.get("/props")
        self.degraded = differences(self.attempt.plan, self.attempt.facts, props)
        if self.degraded and self._strict:
            first = self.degraded[0]
            what = f"{first.subject}: wanted {first.wanted}, got {first.got} ({first.because})"
            self._post(Refused(Failure("degraded", what, "strict = true refuses to serve this; see `edgellm plan`")))
            return
        failure = await self._first_completion()
        if failure is not None:
            self._post(Hung(failure))
            return
        self.first_token_s = time.monotonic()
        self.attempt.warmed(self.first_token_s, "a completion came back")
        self._post(Warmed())

    async def _first_completion(self) -> Failure | None:
        refusal = "no answer"
        for request in warmup.first(self._role, self._chat_template):
            status = 503
            while status == 503:  # /health is green a moment before completions are (FC-31)
                try:
                    status, answer = await self._probe.post(request.path, request.body)
                except (aiohttp.ClientError, OSError):
                    return None if self.child.poll() else Failure("warm_up_failed", "the connection broke", "see logs")
                if warmup.answered(request, status, answer):
                    return None
                if status == 503:
                    await asyncio.sleep(0.02)
            refusal = f"{request.path} answered {status}"
        hint = "the engine is up but cannot complete a prompt: see `edgellm logs --engine`"
        return Failure("warm_up_failed", refusal, hint)

    # --- its movement ------------------------------------------------------------------------------------------------

    async def _watch_movement(self) -> None:
        """Rising: any line, byte or CPU time. Serving: only while a request is open; idle is no hang."""
        moved_s, last = time.monotonic(), None
        while True:
            await asyncio.sleep(LOOK_S)
            vitals = read_vitals(self.child.pid)
            now, seen = time.monotonic(), (vitals.movement if vitals else None, self.attempt.lines)
            serving = self.first_token_s is not None
            if seen != last or (serving and self._traffic.open == 0):
                moved_s, last = now, seen
            quiet_s = now - max(moved_s, self._traffic.moved_s if serving else 0.0)
            if quiet_s >= (self._policy.wedge_s if serving else self._policy.stall_s):
                self._post(Hung(_hung(serving, quiet_s)))
                return


def _hung(serving: bool, quiet_s: float) -> Failure:
    if serving:
        what = f"a request waits and nothing moved for {quiet_s:.0f} s: no token, no CPU time, no log line"
        return Failure("wedged", what, "it is restarted; if it happens again, update the engine or the driver")
    what = f"no log line, byte or CPU time for {quiet_s:.0f} s while loading"
    return Failure("stalled", what, "is the disk answering? see `dmesg` and `edgellm doctor`")
