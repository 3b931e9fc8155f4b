"""Observe one child from spawn to exit and post events. Decides nothing."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from edge.board.nvml import process_bytes
from edge.linux.procfs import ProcessUsage, family_pids, read_family_usage
from edge.linux.rpc import connected, reachable
from edge.linux.sockets import listener_pid
from edge.linux.timeouts import DeadlineExceeded, happens, in_thread, within
from edge.supervisor.degraded import differences, grown, refused
from edge.supervisor.diagnose import Death, diagnose
from edge.supervisor.events import (
    DeviceMissing,
    Drained,
    EngineLoading,
    EngineReady,
    Event,
    Exited,
    FirstRequestDue,
    Hung,
    Sleep,
    StartRefused,
    Warmed,
)
from edge.supervisor.liveness import StallDetector, busy_excuses, foreign, remote_lost, slots_work, stalled, wedged
from edge.supervisor.log_patterns import Patterns
from edge.supervisor.oom import OomWitness
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.process import Child
from edge.supervisor.process_io import PipeLines, gone, read_lines, reaped
from edge.supervisor.prompt_cache import saved_prompts
from edge.supervisor.remedies import Remedies
from edge.supervisor.start import Attempt, LogEvent
from edge.supervisor.status import Degraded, Failure
from edge.supervisor.traffic import Traffic
from edge.supervisor.warmup_run import ConnectionLost, EngineClient, Warming

HEALTH_POLL_S = 0.1  # until the engine logs that it is ready; then /health is asked at once
# "model loaded" is logged some milliseconds before /health answers 200.
REPORTED_POLL_S = 0.002
# Polls cost the engine CPU time: at 1 Hz that stays below what liveness takes for work (IDLE_CPU_RATIO).
HEALTH_POLL_MOST_S = 1.0
HEALTH_POLL_GROWTH = 1.15
SLOTS_TIMEOUT_S = 1.0  # /slots waits for the batch that is computed
IDLE_LOOK_S = 10.0  # how often memory is compared with the plan while no request is open
# A waiting request takes some milliseconds to be connected and sent; with one slot, what comes first is answered first.
HEAD_START_S = 0.1
PIPES_END_S = 0.2  # a dead child's last lines are in the pipe; a grandchild may hold its end open
DRIVER_S = 5.0  # as NVML's limit: a driver that loads firmware takes 1 to 3 s
GPU_BYTES_S = 1.0  # of a driver that has just computed; without the answer only the calibration lacks a value
_ANSWERED = {"embedding": "an embedding came back", "rerank": "a ranking came back"}
REMOTE_PATIENCE = 5  # while another board computes a batch, this engine is as quiet as one that hangs
CORE_DUMP_S = 10.0  # from a broken connection to the exit of a process that writes a core of some GiB


class Watch:
    """The observation of one child. `post` takes its events; `on_line` each log line; `before`: known degradations.

    `held`: how many requests wait of which one may be the engine's first. `probe`: by default of the child's socket.
    """

    _patience = 1  # times the limit of silence
    engine_ready_s: float | None = None
    first_token_s: float | None = None
    _hung: str | None = None  # kind of the hang that was posted

    def __init__(
        self,
        child: Child,
        attempt: Attempt,
        patterns: Patterns,
        terms: SupervisorOptions,
        *,
        post: Callable[[Event], None],
        on_line: Callable[[str], None],
        traffic: Traffic,
        held: Callable[[], int],
        chat_template: bool,
        before: tuple[Degraded, ...],
        wedge_s: float,
        remedies: Remedies | None,
        driver: Callable[[], str | None],
        gpu_load: Callable[[], float | None],
        on_speed: Callable[[float], None],
        memory_back: Callable[[], None],
        probe: EngineClient | None = None,
    ) -> None:
        self.child = child
        self.attempt = attempt
        self.measured: dict[str, int] = {}  # the most that an engine beside llama.cpp held, by memory domain
        self.gpu_bytes: int | None = None  # of the child on all GPUs, after its first decode
        self.signalled = False  # the supervisor sent it a signal
        self.answered = asyncio.Event()  # a client got a token before the engine was READY
        self._patterns = patterns
        self._terms = terms
        self._post = post
        self._on_line = on_line
        self._traffic = traffic
        self._held = held
        self._on_speed, self._memory_back = on_speed, memory_back
        self._remedies = remedies
        self._driver, self._gpu_load = driver, gpu_load
        self._slots: str | None = None  # counters of the engine's slots
        self._pipes: tuple[PipeLines, ...] = ()
        self._before = before
        self._differences: tuple[Degraded, ...] = ()
        self._memory: tuple[Degraded, ...] = ()
        self._wedge_s = wedge_s
        self._probe = probe or EngineClient(child.socket_path)
        self.warming = Warming(self._probe, attempt.plan.settings, chat_template, terms)
        self._prompts = saved_prompts(self._probe, attempt.plan, terms, traffic)
        self._reported_ready, self._exited = asyncio.Event(), asyncio.Event()
        self._witness = OomWitness(child.pid, child.spawned_at_s)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def degraded(self) -> tuple[Degraded, ...]:
        return (*self._before, *self._differences, *self._memory, *self.warming.slow)

    def start(self) -> None:
        for work in (self._reap(), self._ask_health(), self._watch_liveness()):
            self._begin(work)
        if self.attempt.wants_gpu:
            self._begin(self._check_driver())
        self._prompts.look()

    def warm_up(self) -> None:
        self._begin(self._warm())

    async def kill(self) -> None:
        """Kill and reap the child, and all that it started."""
        self.child.send(signal.SIGKILL)
        await reaped(self.child)
        await asyncio.to_thread(self.child.end_rest)

    def drained(self) -> None:
        """Post Drained once the prompts of the slots are saved; the deadline of the drain ends that too."""
        if not self.warming.ended:
            self.warming.ended = True
            self._begin(self._save_and_end())

    async def _save_and_end(self) -> None:
        if not self.warming.busy:  # its request holds the slot and its batch the answer of /slots
            await self._prompts.save()
        self.warming.ended = not self._traffic.open  # a request that had its endpoint before comes here at its end
        if self.warming.ended:
            self._post(Drained(saved=True))

    async def close(self) -> None:
        """Stop observing. The child must be gone, or have its signal."""
        self._prompts.close(asked=self.signalled and self._hung is None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.child.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._post(Hung(Failure("bug", f"{type(error).__name__}: {error}", "please report this")))

    def _handle(self, events: Sequence[LogEvent]) -> None:
        for event in events:
            if event.what == "loading":
                self._post(EngineLoading())
            elif event.what == "ready":
                self._reported_ready.set()
            elif (missing := event.missing) is not None:
                failure = Failure(missing.kind, self.attempt.tail[-1] if self.attempt.tail else "", missing.hint)
                self._post(DeviceMissing(failure, missing.permanent))

    def _stderr(self, raw: str) -> None:
        self._on_line(raw)
        self._handle(self.attempt.stderr(raw, time.monotonic()))

    def _stdout(self, raw: str) -> None:
        self._handle(self.attempt.stdout(raw, time.monotonic()))

    async def _reap(self) -> None:
        read = [await read_lines(self.child.stderr, self._stderr), await read_lines(self.child.stdout, self._stdout)]
        self._pipes = tuple(lines for _, lines in read)
        try:
            await gone(self.child.pid)
            for pipe in self._pipes:
                pipe.hurry()
            with suppress(DeadlineExceeded):
                await within(asyncio.gather(*(pipe.ended.wait() for pipe in self._pipes)), PIPES_END_S)
        finally:
            for transport, _ in read:
                transport.close()
        status = await reaped(self.child)
        # What a script started goes with it; after our SIGTERM it gets the time of a graceful end.
        grace_s = self._terms.policy.term_s if self.signalled and status.signal != signal.SIGKILL else 0.0
        await asyncio.to_thread(self.child.end_rest, grace_s)
        # The kernel's OOM killer sends SIGKILL only, and a signal of the supervisor's own is no evidence.
        status = status.of_engine()
        oom_killed = status.signal == signal.SIGKILL and not self.signalled and self._witness.killed()
        known = (status, list(self.attempt.tail), oom_killed, self.signalled, self.attempt.served, self._terms.l4t)
        diagnosis = await in_thread(partial(diagnose, Death(*known, self.attempt.log.causes), self._patterns), None)
        self.attempt.failed(diagnosis.failure)
        self._exited.set()
        kind = self._hung or diagnosis.failure.kind
        remedies = self._remedies.for_kind(kind, self.attempt.plan) if self._remedies is not None else ()
        self._post(Exited(diagnosis.fault, diagnosis.failure, random.random(), remedies))

    # --- the driver, whose calls may hang: never on the event loop ---------------------------------------------------

    async def _check_driver(self) -> None:
        try:
            evidence = await in_thread(self._driver, DRIVER_S)
        except DeadlineExceeded:
            self.attempt.driver_hangs(DRIVER_S)
            return
        if evidence is not None:
            self.attempt.driver_opens(evidence)

    async def _ask_gpu_bytes(self) -> None:
        if self.attempt.plan.env.get("CUDA_VISIBLE_DEVICES"):
            with suppress(DeadlineExceeded):
                self.gpu_bytes = await in_thread(partial(process_bytes, self.child.pid), GPU_BYTES_S)

    # --- readiness --------------------------------------------------------------------------------------------------

    async def _ask_health(self) -> None:
        pause_s, reported = HEALTH_POLL_S, False
        while not await self._probe.serves():
            if not reported and self._reported_ready.is_set():
                reported, pause_s = True, REPORTED_POLL_S
            await (asyncio.sleep(pause_s) if reported else happens(self._reported_ready, pause_s))
            pause_s = min(pause_s * HEALTH_POLL_GROWTH, HEALTH_POLL_MOST_S)
        if not await self._listens():
            return
        self.child.guard()
        self._witness.pids.update(family_pids(self.child.pid))
        self.engine_ready_s = time.monotonic()
        vitals = read_family_usage(self.child.pid)
        self._handle(self.attempt.answered(self.engine_ready_s, vitals.rss_bytes if vitals else None))
        self._post(EngineReady())

    async def _listens(self) -> bool:
        """Return whether the engine that answers is the child. If not, the failure is posted."""
        listener = await in_thread(partial(listener_pid, self.child.socket_path), None)
        if not (own := self.child.owns(listener)):
            self._hang(foreign(listener))
        return own

    async def _look_at_memory(self, vitals: ProcessUsage | None) -> None:
        self._memory = grown(self.attempt.plan, vitals)

    async def _warm(self) -> None:
        self._differences = differences(self.attempt.plan, self.attempt.facts, await self._probe.get("/props"))
        if self._terms.strict and self.degraded:
            self._post(StartRefused(refused(self.degraded[0])))
            return
        await self._prompts.restore()
        try:
            failure = await self._first_completion()
        except ConnectionLost as lost:
            # An engine that dies in its first decode is diagnosed by its exit; here only one that lives on.
            if await happens(self._exited, CORE_DUMP_S):
                return
            failure = Failure("warm_up_failed", f"the connection broke: {lost}", "see `edgellm logs --engine`")
        if failure is not None:
            if self.warming.refused:
                self._post(StartRefused(failure))
            else:
                self._hang(failure)
            return
        self.first_token_s = time.monotonic()
        await self._ask_gpu_bytes()
        own = _ANSWERED.get(self.attempt.plan.settings.role, "a completion came back")
        evidence = "a waiting request was answered" if self.answered.is_set() else own
        self.attempt.warmed(self.first_token_s, evidence)
        if not (self._traffic.open or self._held() or self.answered.is_set()):
            await self._prompts.restore()  # the probe took a slot
        self._post(Warmed())
        await self.warming.idle(self._traffic)
        if self.warming.tokens_s is not None:
            self._on_speed(self.warming.tokens_s)
        await self._prompts.run(self.warming)

    async def _first_completion(self) -> Failure | None:
        """Return None once a completion came back: that of a request that waited, or of the engine's own probe.

        A waiting request is let in first and its answer is the observation. The probe is sent HEAD_START_S later: it
        stands for requests that fail, are cancelled, or send no byte before their last token.
        """
        if self._held():
            self.attempt.let_in()
            self._post(FirstRequestDue())
            if await happens(self.answered, HEAD_START_S):
                return None
        client = asyncio.ensure_future(self.answered.wait())
        probe = asyncio.ensure_future(self.warming.first())
        try:
            await asyncio.wait({client, probe}, return_when=asyncio.FIRST_COMPLETED)
            return None if client.done() else probe.result()
        finally:
            client.cancel()
            probe.cancel()
            await asyncio.gather(client, probe, return_exceptions=True)

    # --- liveness ---------------------------------------------------------------------------------------------------

    async def _watch_liveness(self) -> None:
        """Post a stall or a hang. While starting it is always judged, while serving only with a request open."""
        # A look may wait for a driver and for /slots; one second more is the lag of a busy board.
        stalls = StallDetector(time.monotonic(), self._terms.policy.look_s + 2 * SLOTS_TIMEOUT_S + GPU_BYTES_S)
        while True:
            serving = self.first_token_s is not None
            if serving and not self._traffic.open:
                in_s = max(self._terms.policy.look_s, self._sleeps_in_s(time.monotonic()))
                await happens(self._traffic.opened, min(IDLE_LOOK_S, in_s))
            else:
                await asyncio.sleep(self._terms.policy.look_s)
            vitals, now = read_family_usage(self.child.pid), time.monotonic()
            idle = serving and not self._traffic.open
            work = (self.attempt.lines, sum(pipe.partial for pipe in self._pipes), self._slots)
            quiet_s = stalls.look(now, vitals, work, excused=idle)
            if serving:
                await self._look_at_memory(vitals)
                quiet_s = min(quiet_s, now - self._traffic.moved_s)
            elif vitals is not None:
                self.attempt.bytes_read(vitals.read_bytes)
            if vitals is not None:
                self._witness.alive(now)
            if idle and vitals is not None:
                if self._disconnected():
                    return
                self._memory_back()  # a rung that was lost comes back while no request is open
            if idle and self._sleeps_in_s(now) <= 0:
                self._post(Sleep())
            limit_s = self._patience * (self._wedge_s if serving else self._terms.policy.stall_s)
            if serving and quiet_s >= limit_s / 2:  # ask before it is judged: the answer counts at the next look
                self._slots = slots_work(await self._probe.get("/slots", SLOTS_TIMEOUT_S)) or self._slots
            if not serving:
                self.child.guard()
                self._witness.pids.update(family_pids(self.child.pid))
                if not self._traffic.open and self._endless(stalls, now, vitals):
                    return
            silent = quiet_s >= limit_s and not busy_excuses(self._gpu_load(), quiet_s, limit_s)
            if silent and await self._quiet(wedged(quiet_s) if serving else stalled(quiet_s), serving):
                return

    def _endless(self, stalls: StallDetector, now: float, vitals: ProcessUsage | None) -> bool:
        """Report a start that has no end, and kill it: in a template it takes no SIGTERM, and may take more memory."""
        loaded = self.attempt.log.loaded and self.engine_ready_s is None
        if (failure := stalls.endless(now, vitals, loaded=loaded, drafts=self.attempt.drafts)) is not None:
            self._hang(failure)
            self.signalled |= self.child.send(signal.SIGKILL)
        return failure is not None

    def _disconnected(self) -> bool:
        """Report an rpc-server whose connection is gone while no request is open, so that none has to find it."""
        lost = next((each for each in self.attempt.plan.settings.rpc if not connected(self.child.pid, each)), None)
        if lost is not None:
            self._hang(remote_lost(f"{lost} closed its connection"))
        return lost is not None

    async def _quiet(self, failure: Failure, serving: bool) -> bool:
        """Report a hang, and return whether it is one. An rpc-server that takes no connection any more is its cause.

        A board that loses its power closes no connection, so that the engine waits for its answer without end.
        """
        for endpoint in self.attempt.plan.settings.rpc:
            if await in_thread(partial(reachable, endpoint), None):
                continue
            lost = remote_lost(f"{endpoint} takes no connection\n{failure.evidence}")
            self._hang(lost, loading=not serving)
            return True
        if self.attempt.plan.settings.rpc and self._patience == 1:
            self._patience = REMOTE_PATIENCE
            return False
        self._hang(failure)
        return True

    def _hang(self, failure: Failure, *, loading: bool = False) -> None:
        """Post why the engine has to be ended. `loading`: a planned device is missing, which another plan can mend."""
        self._hung = failure.kind
        self._post(DeviceMissing(failure) if loading else Hung(failure))

    def _sleeps_in_s(self, now: float) -> float:
        """Return the seconds until the model may sleep; infinity is never."""
        limit_s = self._traffic.idle_limit_s(self._terms.ttl_s)
        return math.inf if limit_s is None else limit_s + max(self._traffic.moved_s, self.first_token_s or now) - now
