"""Proves that one engine completes, and makes its first answers fast while nobody asks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from edge.plan.plan import Settings
from edge.status import Degraded, Failure
from edge.supervisor import warmup
from edge.supervisor.probe import Probe
from edge.supervisor.terms import Pace, Terms
from edge.supervisor.traffic import Traffic

AGAIN_S = (0.02, 0.5)  # a 503 of a completion, first and at most: seen for milliseconds, but also for ever
PACE_RATIO = 0.25  # below a quarter of what the board can do something is wrong, not only slow


class ConnectionLost(Exception):
    """The engine ended the connection: its exit says why."""


class Warming:
    """`tokens_s` and `slow` are known after the idle set."""

    def __init__(self, probe: Probe, settings: Settings, chat_template: bool, terms: Terms) -> None:
        self.tokens_s: float | None = None
        self.slow: tuple[Degraded, ...] = ()
        self.busy = False  # something of ours is being asked while idle
        self.idle_done: tuple[str, ...] = ()  # what of the idle set was tried
        self._probe = probe
        self._settings = settings
        self._chat_template = chat_template
        self._terms = terms
        self._prompt_token_s: float | None = None

    async def first(self) -> Failure | None:
        """None once a completion came back. Raises ConnectionLost."""
        refusal = "no answer"
        for request in warmup.first(self._settings.role, self._chat_template):
            pause_s, longest_s = AGAIN_S
            while True:
                status, answer = await self._ask(request)
                if warmup.answered(request, status, answer):
                    self._learn(answer)
                    return None
                if status != 503:
                    break
                await asyncio.sleep(pause_s)  # /health is green a moment before completions are (FC-31)
                pause_s = min(pause_s * 1.5, longest_s)
            refusal = f"{request.path} answered {status}"
        hint = "the engine is up but cannot complete a prompt: see `edgellm logs --engine`"
        return Failure("warm_up_failed", refusal, hint)

    async def idle(self, traffic: Traffic) -> None:
        """Runs the idle set. What was slow is measured once more before it is said."""
        policy = self._terms.policy
        await asyncio.sleep(policy.idle_before_s)
        await self._idle_set(traffic)
        if self.tokens_s is None or not too_slow(self.tokens_s, self._terms.pace):
            return
        await asyncio.sleep(policy.second_look_s)
        speed = next(warmup.idle(self._settings, (), ""))
        if not traffic.open and (answer := await self._while_idle(speed, policy.idle_set_s, traffic)) is not None:
            self._measure(answer)
        self.slow = too_slow(self.tokens_s, self._terms.pace)

    async def _idle_set(self, traffic: Traffic) -> None:
        """At most `idle_set_s` in all, and a request of anybody ends it at once."""
        end_s = time.monotonic() + self._terms.policy.idle_set_s
        requests = warmup.idle(self._settings, self._terms.warmup_tokens, self._terms.system_prompt)
        for request in requests:
            left_s = end_s - time.monotonic()
            if traffic.open or left_s <= 0:
                return
            if request.prompt_tokens * (self._prompt_token_s or 0.0) > left_s:
                continue  # a prompt that is being read cannot be called off
            answer = await self._while_idle(request, left_s, traffic)
            if answer is None:
                return
            self.idle_done = (*self.idle_done, request.name)
            if request.name == "speed":
                self._measure(answer)
            self._learn(answer)

    async def _while_idle(self, request: warmup.Request, left_s: float, traffic: Traffic) -> Any | None:
        """The answer; None when somebody came, time was over, or the engine did not like it."""
        asked = [asyncio.create_task(self._ask(request)) for _ in range(request.copies)]
        together = asyncio.ensure_future(asyncio.gather(*asked, return_exceptions=True))
        somebody = asyncio.ensure_future(traffic.opened.wait())
        waited: set[asyncio.Future[Any]] = {together, somebody}
        self.busy = True
        try:
            await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not together.done():
                return None
            first = together.result()[0]
            if isinstance(first, BaseException):  # it died; its exit will say why
                return None
            return first[1] if warmup.answered(request, *first) else None
        finally:
            for each in (*asked, somebody):  # closes the connections, and with them the work
                each.cancel()
            await asyncio.gather(*waited, return_exceptions=True)
            self.busy = False

    async def _ask(self, request: warmup.Request) -> tuple[int, Any]:
        try:
            return await self._probe.post(request.path, request.body)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(type(error).__name__) from error

    def _learn(self, answer: Any) -> None:
        """The slowest rate seen bounds how long a longer prompt takes: longer ones are read faster a token."""
        per_second = warmup.timing(answer, "prompt_per_second")
        if per_second is not None:
            self._prompt_token_s = 1.0 / per_second

    def _measure(self, answer: Any) -> None:
        tokens_s = warmup.timing(answer, "predicted_per_second")
        if tokens_s is not None:
            self.tokens_s = max(tokens_s, self.tokens_s or 0.0)


def too_slow(tokens_s: float, pace: Pace | None) -> tuple[Degraded, ...]:
    """Pure. Speed can only degrade: it never keeps a model from serving."""
    if pace is None or tokens_s >= PACE_RATIO * pace.tokens_s:
        return ()
    wanted = f"at least {PACE_RATIO * pace.tokens_s:.1f} tokens/s"
    return (Degraded("speed", wanted, f"{tokens_s:.1f} tokens/s", f"a quarter of {pace.source}"),)
