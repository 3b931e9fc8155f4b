"""Send the first completion, and warm up an idle engine so that its first answers are fast."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from aiohttp.client_exceptions import ClientError

from edge.linux.files import parse_foreign_json
from edge.linux.timeouts import DeadlineExceeded, within
from edge.plan.plan import Settings
from edge.supervisor import warmup
from edge.supervisor.engine_connection import DOCUMENT_BYTES, EngineAnswer, EngineConnection, Pairs
from edge.supervisor.policy import ExpectedSpeed, SupervisorOptions
from edge.supervisor.status import Degraded, Failure
from edge.supervisor.traffic import Traffic
from edge.supervisor.upstream import Endpoint

# A long prompt may block /health for seconds: a late answer means a busy engine, and the next poll asks again.
HEALTH_TIMEOUT_S = 2.0
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 10  # a framework adds a slash, or leads from / to a page
_JSON: Pairs = [("Content-Type", "application/json")]


class EngineClient:
    """The client of one child, over its private unix socket or its loopback port: one connection for each request."""

    def __init__(self, socket_path: Path, port: int | None = None, ready: str = "/health") -> None:
        """`ready`: the path that answers 2xx once the engine serves."""
        self._endpoint = Endpoint(str(socket_path), 0, port=port)
        self._ready = ready

    async def serves(self) -> bool:
        return (await self.health() or 0) // 100 == 2

    async def health(self) -> int | None:
        """Return the status of the readiness path, after redirects; None when nothing answers."""
        with suppress(ClientError, OSError, asyncio.TimeoutError, DeadlineExceeded, ValueError):
            return await within(self._follow(self._ready), HEALTH_TIMEOUT_S)
        return None

    async def _follow(self, path: str) -> int:
        for _ in range(_MOST_REDIRECTS):
            answer, _body = await self._ask("GET", path)
            if answer.status not in _REDIRECTS or "Location" not in answer.headers:
                break
            target = urlsplit(urljoin(path, answer.headers["Location"]))  # whatever host it names: there is one engine
            path = urlunsplit(("", "", target.path or "/", target.query, ""))
        return answer.status

    async def get(self, path: str, timeout_s: float | None = None) -> Any | None:
        """Return a JSON document; None when there is none in time."""
        with suppress(ClientError, OSError, asyncio.TimeoutError, DeadlineExceeded, ValueError):
            answer, body = await within(self._ask("GET", path), timeout_s)
            return parse_foreign_json(body) if answer.status == 200 else None
        return None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON, without a timeout. Raises ClientError or OSError if the engine goes away."""
        answer, text = await self._ask("POST", path, json.dumps(body).encode())
        try:
            return answer.status, parse_foreign_json(text)
        except ValueError:
            return answer.status, None

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[EngineAnswer, bytes]:
        connection = EngineConnection(self._endpoint)
        try:
            answer = await connection.request(method, path, _JSON if body is not None else [], body)
            # Closed half-read, it would make the engine log a broken connection.
            return answer, await answer.read(DOCUMENT_BYTES)
        finally:
            connection.close()  # of a request that is cancelled: the engine ends its work


# Pauses after a 503 of a completion, first and longest: mostly it lasts milliseconds, in some builds minutes (FC-31).
RETRY_S = (0.02, 0.5)
_PASSING = (408, 425, 429)  # a time-out, too early, too many requests: another try may be answered
UNAVAILABLE_MOST_S = 900.0  # the engine polls well and prints lines meanwhile, so that no stall is seen
# Below a quarter of what the board can deliver the cause is a fault (clocks, CPU instead of GPU, swap), not load.
SLOW_RATIO = 0.25


class ConnectionLost(Exception):
    """The engine closed the connection; its exit is diagnosed elsewhere."""


class Warming:
    """The warm-up of one child. `tokens_s` and `slow` are known after `idle()`."""

    def __init__(self, probe: EngineClient, settings: Settings, chat_template: bool, terms: SupervisorOptions) -> None:
        self.tokens_s: float | None = None
        self.refused = False  # the engine answered the first completion with 4xx or 501
        self.slow: tuple[Degraded, ...] = ()
        self.busy = False  # a request of the idle set is open
        self.ended = False  # the engine is to go: no further request of the idle set
        self.idle_done: tuple[str, ...] = ()  # names of the requests that were sent
        self._probe = probe
        self._settings = settings
        self._chat_template = chat_template
        self._terms = terms
        self._prompt_token_s: float | None = None

    async def first(self) -> Failure | None:
        """Return None once a completion came back. Raises ConnectionLost."""
        refusal, statuses, give_up_s = "no answer", [], time.monotonic() + UNAVAILABLE_MOST_S
        for request in warmup.first(self._settings.role, self._chat_template):
            pause_s, longest_s = RETRY_S
            while True:
                status, answer = await self._ask(request)
                if warmup.answered(request, status, answer):
                    self._note_prompt_speed(answer)
                    return None
                if status != 503 or time.monotonic() >= give_up_s:
                    break
                await asyncio.sleep(pause_s)  # /health answers 200 before completions do (FC-31)
                pause_s = min(pause_s * 1.5, longest_s)
            refusal = f"{request.path} answered {status}: {warmup.error_message(answer)}"
            statuses.append(status)
        # These are about the request itself: the same settings get the same answer at each start.
        self.refused = bool(statuses) and all(
            status == 501 or (400 <= status < 500 and status not in _PASSING) for status in statuses
        )
        hint = "the engine is up but cannot complete a prompt: see `edgellm logs --engine`"
        return Failure("warm_up_failed", refusal, hint)

    async def idle(self, traffic: Traffic) -> None:
        """Send the idle set. A low speed is measured once more before it counts."""
        policy = self._terms.policy
        await asyncio.sleep(policy.idle_before_s)
        await self._idle_set(traffic)
        if self.tokens_s is None or not too_slow(self.tokens_s, self._terms.expected_speed):
            return
        await asyncio.sleep(policy.second_look_s)
        speed = next(warmup.idle(self._settings, (), ""))
        if not traffic.open and (answer := await self.while_idle(speed, policy.idle_set_s, traffic)) is not None:
            self._measure(answer)
        self.slow = too_slow(self.tokens_s, self._terms.expected_speed)

    async def _idle_set(self, traffic: Traffic) -> None:
        """Send requests for at most `idle_set_s`; the first client ends it."""
        terms = self._terms
        end_s = time.monotonic() + terms.policy.idle_set_s
        requests = warmup.idle(
            self._settings, terms.warmup_tokens, terms.system_prompt, chat_template=self._chat_template
        )
        for request in requests:
            left_s = end_s - time.monotonic()
            if traffic.open or left_s <= 0:
                return
            if request.name in traffic.fatal_warmups:
                continue
            if request.prompt_tokens * (self._prompt_token_s or 0.0) > left_s:
                continue  # llama-server does not cancel a prompt in the middle of a batch
            answer = await self.while_idle(request, left_s, traffic)
            if answer is None and request.name == warmup.AN_IMAGE and traffic.unanswered is None:
                continue  # refused: a chat template may have no place for one
            if answer is None:
                return
            self.idle_done = (*self.idle_done, request.name)
            if request.name == "speed":
                self._measure(answer)
            self._note_prompt_speed(answer)

    async def while_idle(self, request: warmup.WarmupRequest, left_s: float, traffic: Traffic) -> Any | None:
        """Return the answer; None when a client came, time was over, or the engine refused."""
        if self.ended:
            return None
        asked = [asyncio.create_task(self._ask(request)) for _ in range(request.copies)]
        together = asyncio.ensure_future(asyncio.gather(*asked, return_exceptions=True))
        client = asyncio.ensure_future(traffic.opened.wait())
        waited: set[asyncio.Future[Any]] = {together, client}
        self.busy, traffic.unanswered, traffic.unanswered_s = True, request.name, None
        try:
            await asyncio.wait(waited, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not together.done():
                return None
            first = together.result()[0]
            if isinstance(first, BaseException):  # its exit is diagnosed elsewhere
                return None
            traffic.unanswered = None
            return first[1] if warmup.answered(request, *first) else None
        finally:
            for each in (*asked, client):  # closes the connections, which cancels the work
                each.cancel()
            await asyncio.gather(*waited, return_exceptions=True)
            self.busy, traffic.unanswered_s = False, time.monotonic()

    async def _ask(self, request: warmup.WarmupRequest) -> tuple[int, Any]:
        try:
            return await self._probe.post(request.path, request.body)
        except (ClientError, OSError) as error:
            raise ConnectionLost(type(error).__name__) from error

    def _note_prompt_speed(self, answer: Any) -> None:
        """Keep the last prompt speed. It bounds how long a longer prompt takes: those take less time per token."""
        per_second = warmup.timing(answer, "prompt_per_second")
        if per_second is not None:
            self._prompt_token_s = 1.0 / per_second

    def _measure(self, answer: Any) -> None:
        tokens_s = warmup.timing(answer, "predicted_per_second")
        if tokens_s is not None:
            self.tokens_s = max(tokens_s, self.tokens_s or 0.0)


def too_slow(tokens_s: float, expected: ExpectedSpeed | None) -> tuple[Degraded, ...]:
    """Return the degradation of a speed below a quarter of the expected one. It never keeps a model from serving."""
    if expected is None or tokens_s >= SLOW_RATIO * expected.tokens_s:
        return ()
    wanted = f"at least {SLOW_RATIO * expected.tokens_s:.1f} tokens/s"
    return (Degraded("speed", wanted, f"{tokens_s:.1f} tokens/s", f"a quarter of {expected.source}"),)
