"""Send a request to an engine byte for byte, and its answer to the client chunk by chunk."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.client_exceptions import ClientError
from msgspec import Struct, field
from multidict import CIMultiDict

from edge.gateway import headers
from edge.gateway.accounting import RequestRecord, UsageCounter
from edge.gateway.body import Body
from edge.gateway.connection_pool import Pools
from edge.gateway.ollama_answer import NDJSON, OllamaAnswer, error_text
from edge.gateway.openai import HttpFault, RejectedError, engine_error, is_json, sse_document, sse_error
from edge.gateway.retry import RetryPolicy, UpstreamDied, died_fault
from edge.gateway.waiting_room import ByteReservation
from edge.linux.files import parse_foreign_json, parse_json
from edge.supervisor.engine_connection import (
    ANSWER_BYTES,
    DOCUMENT_BYTES,
    BadAnswer,
    EngineAnswer,
    EngineConnection,
)
from edge.supervisor.upstream import Endpoint, RequestProgress, Upstream

# Answers with a known length up to this size are sent in one packet with their headers.
WHOLE_BYTES = 256 * 1024
_EVENTS = "text/event-stream"
_PAGES = frozenset({"text/html", "application/xhtml+xml"})
_BODILESS = frozenset({204, 304})


class Exchange(Struct):
    """One request on its way to an engine. The proxy writes its outcome into `record`."""

    request: web.Request
    upstream: Upstream
    target: str
    body: Body
    reserved: ByteReservation  # counts the body's bytes until the answer has ended
    record: RequestRecord
    usage: UsageCounter
    wait_until_s: float  # on the loop's clock: the shorter of the client's limit and `hold.seconds`
    extra: Mapping[str, str] = field(default_factory=dict)  # headers added to the answer
    translation: OllamaAnswer | None = None  # the client does not speak llama-server's API
    hide_paths: bool = False  # the client has a key without admin rights
    opened: web.StreamResponse | None = None  # an event stream that is open already, by a heartbeat


async def forward(pools: Pools, exchange: Exchange, endpoint: Endpoint) -> web.StreamResponse:
    """Send the request to `endpoint`, and again if the engine dies before its answer starts. Raises RejectedError."""
    upstream = exchange.upstream
    loop = asyncio.get_running_loop()
    retry = RetryPolicy(upstream, exchange.wait_until_s)
    # The engine may close an idle connection just now; a body that cannot be sent twice gets a new connection.
    fresh = not exchange.body.complete
    fingerprint = _fingerprint(exchange)
    if endpoint.first:
        if upstream.kills(fingerprint):
            raise RejectedError(_kills_engine(upstream))
        response = await _as_first(pools, exchange, endpoint, fingerprint, loop) if exchange.body.complete else None
        if response is not None:
            return response
        endpoint = await retry.proved()
    with upstream.request(fingerprint) as progress:
        while True:
            if upstream.kills(fingerprint):
                raise RejectedError(_kills_engine(upstream))
            try:
                return await _attempt(pools, exchange, endpoint, progress, loop, fresh)
            except UpstreamDied as died:
                if died.partial:
                    exchange.record.outcome = "cut"
                if died.partial or exchange.body.sent:
                    raise RejectedError(died_fault(upstream, str(died))) from died
                exchange.record.retried = fresh = True
                lost = died
            endpoint = await retry.endpoint(endpoint, lost)


class _Refused(Exception):
    """An engine that has completed nothing yet answered with 400 or more."""


class _FirstProgress(Struct):
    """The progress of an engine's first request, which reports its first token."""

    progress: RequestProgress
    usage: UsageCounter
    generation: int
    seen: bool = False

    def moved(self) -> None:
        self.progress.moved()
        if not self.seen and self.usage.has_text:
            self.seen = True
            self.progress.answered(self.generation)

    def answered(self, generation: int) -> None:
        self.progress.answered(generation)


async def _as_first(
    pools: Pools,
    exchange: Exchange,
    endpoint: Endpoint,
    fingerprint: Callable[[], str | None],
    loop: asyncio.AbstractEventLoop,
) -> web.StreamResponse | None:
    """Send the request to an engine that has completed nothing yet; None if it refuses or dies before it answers."""
    # The exceptions pass the context of the request: the exit of the engine, seen later, is blamed on what broke.
    try:
        with exchange.upstream.request(fingerprint) as progress:
            watched = _FirstProgress(progress, exchange.usage, endpoint.generation)
            response = await _attempt(pools, exchange, endpoint, watched, loop, fresh=False)
            if exchange.usage.tokens().completion:
                progress.answered(endpoint.generation)
            return response
    except _Refused:
        return None
    except UpstreamDied as died:
        if died.partial:
            exchange.record.outcome = "cut"
            raise RejectedError(died_fault(exchange.upstream, str(died))) from died
        return None


def _fingerprint(exchange: Exchange) -> Callable[[], str | None]:
    """Return the identity of a request, computed when an engine died: per key, so that no client has another's refused.

    None for a question without a body (/slots, /metrics): it waits for the engine's work, and is none.
    """

    def compute() -> str | None:
        if exchange.request.method in ("GET", "HEAD"):
            return None
        who = exchange.record.key_hash or ""
        return f"{who} {exchange.request.method} {exchange.target} {exchange.body.digest()}"

    return compute


def _kills_engine(upstream: Upstream) -> HttpFault:
    message = f"this request was in flight when the engine of model {upstream.model_id!r} died, twice"
    hint = "it is refused for ten minutes: change it (a grammar, an image, a very long prompt), or update the engine"
    return HttpFault(422, "kills_engine", message, hint)


async def _attempt(
    pools: Pools,
    exchange: Exchange,
    endpoint: Endpoint,
    progress: RequestProgress,
    loop: asyncio.AbstractEventLoop,
    fresh: bool,
) -> web.StreamResponse:
    upstream = exchange.upstream
    # Left with an answer that was not read to its end, the connection is closed, and with it the work ends.
    with pools.connection(upstream.model_id, endpoint, upstream.slots, fresh=fresh) as connection:
        answer = await _send(connection, exchange)
        progress.moved()
        if endpoint.first and answer.status >= 400:
            raise _Refused
        if await _unusable(exchange, answer):
            exchange.record.failed()
            raise RejectedError(engine_error(upstream.model_id, answer.status, answer.reason))
        if exchange.opened is not None:
            return await _into(exchange.opened, exchange, answer, progress, loop)
        if exchange.translation is not None and not (exchange.translation.call.stream and answer.status == 200):
            return await _whole(exchange, answer, loop)
        # With paths to hide even a large answer is read whole: a template of 300 KiB is in /props.
        if _is_whole(exchange.request, answer) or (exchange.hide_paths and exchange.request.method != "HEAD"):
            return await _whole(exchange, answer, loop)
        return await _stream(exchange, answer, progress, loop)


def _is_whole(request: web.Request, answer: EngineAnswer) -> bool:
    # Answers to HEAD have a length and no body; aiohttp must not wait for one.
    length = answer.content_length
    bodiless = request.method == "HEAD" or answer.status in _BODILESS
    return length is not None and length <= WHOLE_BYTES and not bodiless


async def _unusable(exchange: Exchange, answer: EngineAnswer) -> bool:
    """Return whether no API client can read an answer: an error that is no JSON, or a web page for a POST.

    cpp-httplib itself answers 4xx with an empty body where llama-server's handlers were not reached; other engines and
    their web frameworks answer with pages and plain text, whatever type they state.
    """
    request, kind, size = exchange.request, answer.content_type, answer.content_length
    if request.method == "HEAD" or (kind in _PAGES and "text/html" in request.headers.get("Accept", "")):
        return False
    if answer.status < 400:
        return kind in _PAGES and request.method == "POST"
    if kind in _PAGES or kind == _EVENTS:
        return kind in _PAGES
    if size is None or size > WHOLE_BYTES:  # not read here: it may be endless
        return kind != "application/json"
    try:
        return not is_json(await answer.read())
    except (ClientError, OSError):
        return False  # the next read raises it again


async def _send(connection: EngineConnection, exchange: Exchange) -> EngineAnswer:
    request = exchange.request
    passed = headers.to_upstream(request.headers.items(), exchange.body.decoded)
    if exchange.translation is not None:
        passed = [pair for pair in passed if pair[0].lower() not in ("content-type", "accept", "accept-encoding")]
        passed.append(("Content-Type", "application/json"))
        exchange.translation.sent()
    try:
        return await connection.request(request.method, exchange.target, passed, exchange.body.payload())
    except (ClientError, OSError) as error:
        if exchange.body.fault is not None:
            raise RejectedError(exchange.body.fault) from error
        raise UpstreamDied(error) from error


async def _whole(exchange: Exchange, answer: EngineAnswer, loop: asyncio.AbstractEventLoop) -> web.StreamResponse:
    try:
        most_bytes = DOCUMENT_BYTES if exchange.hide_paths else ANSWER_BYTES
        data = await answer.read(most_bytes, exchange.reserved.grow_answer)
    except BadAnswer as error:
        raise RejectedError(engine_error(exchange.upstream.model_id, answer.status, str(error))) from error
    except (ClientError, OSError) as error:
        exchange.record.outcome = "cut"  # part of the answer came: a retry could do the work twice
        raise RejectedError(died_fault(exchange.upstream, type(error).__name__)) from error
    if data:
        exchange.usage.chunk(data, loop.time())
    if exchange.translation is not None:
        return _translated(exchange, exchange.translation, answer.status, data)
    passed = _headers(exchange, answer)
    if exchange.hide_paths:
        data = _without_paths(data)
        passed.popall("Content-Length", None)
    return web.Response(status=answer.status, reason=answer.reason, headers=passed, body=data)


def _without_paths(data: bytes) -> bytes:
    """Return llama-server's JSON with file names in place of absolute paths (`model_path`, `path` of an adapter)."""

    def short(table: dict[str, Any]) -> dict[str, Any]:
        at = (name for name in ("model_path", "path") if isinstance(table.get(name), str))
        return {**table, **{name: table[name].rpartition("/")[2] for name in at}}

    try:
        return json.dumps(json.loads(data, object_hook=short)).encode()
    except (ValueError, RecursionError):
        return b"{}"


def _translated(exchange: Exchange, translation: OllamaAnswer, status: int, data: bytes) -> web.Response:
    """Return a whole answer, or the engine's error, in the client's shape. Raises RejectedError."""
    try:
        if status >= 400:
            body = json.dumps({"error": error_text(parse_json(data)["error"])}).encode()
        else:
            body = translation.whole(data)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        exchange.record.failed()
        raise RejectedError(engine_error(exchange.upstream.model_id, status, "with what is no answer")) from error
    headers = {"Content-Type": "application/json; charset=utf-8", "Server": "edgellm", **exchange.extra}
    return web.Response(status=status, headers=headers, body=body)


async def _stream(
    exchange: Exchange, answer: EngineAnswer, progress: RequestProgress, loop: asyncio.AbstractEventLoop
) -> web.StreamResponse:
    first = await _arrived(answer)
    made = _OnePacketResponse if first else web.StreamResponse
    response = made(status=answer.status, reason=answer.reason, headers=_headers(exchange, answer))
    exchange.record.streamed = answer.content_type == _EVENTS
    if not exchange.record.streamed:
        exchange.usage.between_s = None  # chunks of a file are not tokens
    await response.prepare(exchange.request)
    exchange.record.code = answer.status
    if first:
        progress.moved()
        exchange.usage.chunk(first, loop.time())
        await response.write(exchange.translation.feed(first) if exchange.translation is not None else first)
    await _copy(response, exchange, answer, progress, loop)
    return response


class _OnePacketResponse(web.StreamResponse):
    """Sends its headers together with its first bytes."""

    _send_headers_immediately = False


async def _arrived(answer: EngineAnswer) -> bytes:
    """Return the bytes of the body that came with the head: llama-server sends its head with the first token."""
    try:
        first = answer.content.read_nowait()
        if not first:
            await asyncio.sleep(0)
            first = answer.content.read_nowait()
        return first
    except (ClientError, OSError):
        return b""  # the next read raises it again


async def _copy(
    response: web.StreamResponse,
    exchange: Exchange,
    answer: EngineAnswer,
    progress: RequestProgress,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Copy the body. This is the hot loop: it runs once for each chunk of each stream."""
    read, write, moved, count, clock = (
        answer.content.readany,
        response.write,
        progress.moved,
        exchange.usage.chunk,
        loop.time,
    )
    translation = exchange.translation
    while True:
        try:
            chunk = await read()
        except (ClientError, OSError):
            await _cut(response, exchange)
            return
        if not chunk:
            if translation is not None and (rest := translation.close()):
                await write(rest)
            if translation is not None and translation.broken:
                exchange.record.failed()
            return
        moved()
        count(chunk, clock())
        if translation is not None:
            chunk = translation.feed(chunk)
        if chunk:
            await write(chunk)


async def _into(
    response: web.StreamResponse,
    exchange: Exchange,
    answer: EngineAnswer,
    progress: RequestProgress,
    loop: asyncio.AbstractEventLoop,
) -> web.StreamResponse:
    """Write the answer into a stream that is open already, an error of the engine's as an event."""
    if answer.status == 200 and answer.content_type == _EVENTS:
        exchange.record.streamed = True
        await _copy(response, exchange, answer, progress, loop)
        return response
    try:
        data = await answer.read(grow=exchange.reserved.grow_answer)
        document = parse_foreign_json(data)  # a NaN would be no JSON for the client either
    except (ClientError, OSError, ValueError):
        raise RejectedError(died_fault(exchange.upstream, f"status {answer.status}")) from None
    exchange.usage.chunk(data, loop.time())
    if answer.status >= 400:
        exchange.record.failed()
    await response.write(sse_document(exchange.target, document))
    return response


async def _cut(response: web.StreamResponse, exchange: Exchange) -> None:
    """Send an error event and close without the terminating chunk, so that no client takes the text as complete."""
    exchange.record.outcome = "cut"
    fault = died_fault(exchange.upstream, "in mid-answer")
    if exchange.translation is not None:
        with contextlib.suppress(ConnectionError):
            await response.write(b"\n" + exchange.translation.failed(fault.message))
    elif response.content_type == _EVENTS:
        with contextlib.suppress(ConnectionError):
            await response.write(sse_error(exchange.target, fault))
    # aiohttp would end the chunked body properly, and a client would take the text as complete.
    transport = exchange.request.transport
    if transport is not None:
        transport.close()  # flushes, but never writes the terminating chunk


def _headers(exchange: Exchange, answer: EngineAnswer) -> CIMultiDict[str]:
    passed = CIMultiDict(headers.to_client(answer.headers.items()))
    passed.extend(exchange.extra)
    if exchange.translation is not None:
        passed["Content-Type"], passed["Server"] = NDJSON, "edgellm"
        passed.popall("Content-Length", None)
    return passed
