"""Passing a request on, byte for byte, and the answer back, chunk by chunk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from edge.gateway import headers
from edge.gateway.body import Body
from edge.gateway.hold import Refused, failed, retry_in_s
from edge.gateway.openai import Fault, sse_error
from edge.gateway.pool import Pools
from edge.upstream import Endpoint, Progress, Upstream

# Answers with a known length up to this size are sent in one piece with their headers.
WHOLE_BYTES = 256 * 1024
_BODILESS = frozenset({204, 304})


class UpstreamDied(Exception):
    """The engine's connection ended before the first byte of the answer."""

    def __init__(self, why: str) -> None:
        super().__init__(why)


@dataclass(slots=True)
class Exchange:
    """One request on its way. The proxy writes what happened into it."""

    request: web.Request
    upstream: Upstream
    target: str
    body: Body
    extra: Mapping[str, str] = field(default_factory=dict)  # headers of ours for the answer
    generation: int | None = None  # of the child that answers
    retried: bool = False
    cut: bool = False  # the answer ended before its end


async def forward(pools: Pools, exchange: Exchange, endpoint: Endpoint) -> web.StreamResponse:
    """Sends the request to `endpoint`; once more if the engine died before it said anything. Raises Refused."""
    upstream = exchange.upstream
    with upstream.request() as progress:
        try:
            return await _attempt(pools, exchange, endpoint, progress)
        except UpstreamDied as died:
            upstream.broken(endpoint.generation)
            if not exchange.body.replayable:
                raise Refused(_died(upstream, died)) from died
        exchange.retried = True
        again = await _next_endpoint(upstream)
        try:
            return await _attempt(pools, exchange, again, progress)
        except UpstreamDied as died:
            upstream.broken(again.generation)
            raise Refused(_died(upstream, died)) from died


async def _next_endpoint(upstream: Upstream) -> Endpoint:
    status = await upstream.ensure_ready()
    endpoint = upstream.endpoint()
    if endpoint is None:
        raise Refused(failed(status))
    return endpoint


def _died(upstream: Upstream, died: UpstreamDied) -> Fault:
    failure = upstream.status().failure
    kind = failure.kind if failure else "upstream_died"
    hint = failure.hint if failure else "try again; edgellm logs --engine shows the engine's last lines"
    message = f"the engine of model {upstream.model_id!r} ended the connection: {died}"
    return Fault(502, kind, message, hint, retry_in_s(upstream))


async def _attempt(pools: Pools, exchange: Exchange, endpoint: Endpoint, progress: Progress) -> web.StreamResponse:
    exchange.generation = endpoint.generation
    with pools.session(exchange.upstream.model_id, endpoint) as session:
        answer = await _send(session, exchange, endpoint)
        try:
            progress.moved()
            if _is_whole(exchange.request, answer):
                return await _whole(exchange, answer)
            return await _stream(exchange, answer, progress)
        finally:
            answer.close()  # gives a finished connection back; ends an unfinished one, and with it the work
            if pools.stale:
                await pools.sweep()


async def _send(session: aiohttp.ClientSession, exchange: Exchange, endpoint: Endpoint) -> aiohttp.ClientResponse:
    request = exchange.request
    try:
        return await session.request(
            request.method,
            URL("http://engine" + exchange.target, encoded=True),
            headers=CIMultiDict(headers.to_upstream(request.headers.items(), endpoint.api_key)),
            data=exchange.body.payload(),
            allow_redirects=False,
        )
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        if exchange.body.fault is not None:
            raise Refused(exchange.body.fault) from error
        raise UpstreamDied(type(error).__name__) from error


def _is_whole(request: web.Request, answer: aiohttp.ClientResponse) -> bool:
    length = answer.content_length
    return request.method != "HEAD" and length is not None and length <= WHOLE_BYTES


async def _whole(exchange: Exchange, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    try:
        data = await answer.read()
    except (aiohttp.ClientError, OSError) as error:
        # Bytes of the answer came: asking again could do the work twice.
        _report(exchange)
        raise Refused(_died(exchange.upstream, UpstreamDied(type(error).__name__))) from error
    return web.Response(status=answer.status, reason=answer.reason, headers=_headers(exchange, answer), body=data)


async def _stream(exchange: Exchange, answer: aiohttp.ClientResponse, progress: Progress) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_headers(exchange, answer))
    request = exchange.request
    await response.prepare(request)
    if request.method == "HEAD" or answer.status in _BODILESS:
        return response
    content = answer.content
    while True:
        try:
            chunk = await content.readany()
        except (aiohttp.ClientError, OSError):
            await _cut(exchange, response)
            return response
        if not chunk:
            return response
        progress.moved()
        await response.write(chunk)


async def _cut(exchange: Exchange, response: web.StreamResponse) -> None:
    """The engine died in mid-answer: say so, and end in a way that no client takes for the end of the text."""
    _report(exchange)
    if response.content_type == "text/event-stream":
        fault = _died(exchange.upstream, UpstreamDied("in mid-answer"))
        with contextlib.suppress(ConnectionError):
            await response.write(sse_error(exchange.target, fault))
    transport = exchange.request.transport
    if transport is not None:
        transport.close()  # flushes, but never writes the terminating chunk


def _report(exchange: Exchange) -> None:
    exchange.cut = True
    if exchange.generation is not None:
        exchange.upstream.broken(exchange.generation)


def _headers(exchange: Exchange, answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    passed = CIMultiDict(headers.to_client(answer.headers.items()))
    passed.update(exchange.extra)
    return passed
