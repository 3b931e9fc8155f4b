"""From a route of the engine's to its answer: which model, whose turn, how long to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

from aiohttp import web

from edge.gateway import accesslog, answers
from edge.gateway.body import Body
from edge.gateway.context import Context
from edge.gateway.energy import measured
from edge.gateway.health import DEGRADED, degraded_header
from edge.gateway.heartbeat import Heartbeat
from edge.gateway.hold import Kept
from edge.gateway.intake import turn
from edge.gateway.names import named_model
from edge.gateway.openai import Fault, sse_error
from edge.gateway.proxy import Exchange, forward
from edge.gateway.refused import Refused
from edge.gateway.routes import Route
from edge.gateway.tally import Tally
from edge.gateway.visit import Visit
from edge.units import MIB
from edge.upstream import Upstream

_AT_ONCE_BYTES = 1 * MIB


async def pass_on(
    context: Context, request: web.Request, found: Route, visit: Visit, extra: Mapping[str, str]
) -> web.StreamResponse:
    """Raises Refused."""
    body = Body(request, context.config)
    await body.read(context.config.limits.replay_bytes)
    with context.room.kept() as kept:
        upstream = await _choose(context, request, found, body, kept)
        visit.model = upstream.model_id
        if context.config.log_prompts and body.complete:
            visit.prompt = accesslog.prompt(body.data)
        stats = context.stats.model(upstream.model_id)
        visit.tally = Tally(visit.began_s, stats.between_tokens_s)
        wait_until_s = visit.began_s + _patience_s(request, context.config.hold_seconds)
        exchange = Exchange(request, upstream, found.target, body, kept, visit, visit.tally, wait_until_s, extra)
        if request.headers.get("Edgellm-Heartbeat") == "1" and _would_wait(context, upstream, found):
            return await _with_heartbeat(context, exchange, found)
        return await _take_turn(context, exchange, found, None)


async def _take_turn(
    context: Context, exchange: Exchange, found: Route, beating: AsyncExitStack | None
) -> web.StreamResponse:
    upstream = exchange.upstream
    stats = context.stats.model(upstream.model_id)
    async with turn(
        context.room,
        context.admission,
        upstream,
        exchange.body,
        exchange.kept,
        until_s=exchange.wait_until_s,
        slot=found.slot,
    ) as endpoint:
        if beating is not None:
            await beating.aclose()
        exchange.extra = _honest(context, upstream, exchange.extra)
        if exchange.opened is not None:
            await _add(exchange.opened, exchange.extra)
        stats.in_flight += 1
        try:
            with measured(context.energy if found.slot else None, exchange.visit, upstream.model_id):
                return await forward(context.pools, exchange, endpoint)
        finally:
            stats.in_flight -= 1


async def _with_heartbeat(context: Context, exchange: Exchange, found: Route) -> web.StreamResponse:
    status = exchange.upstream.status()
    known = {**exchange.extra, DEGRADED: degraded_header(status)} if status.degraded else exchange.extra
    heartbeat = Heartbeat(exchange.request, known, exchange.upstream.status)
    async with AsyncExitStack() as beating:
        exchange.opened = await beating.enter_async_context(heartbeat)
        exchange.visit.code = 200
        try:
            return await _take_turn(context, exchange, found, beating)
        except Refused as refused:
            await beating.aclose()
            exchange.visit.refused()
            await exchange.opened.write(sse_error(exchange.target, refused.fault))
            return exchange.opened


async def _add(opened: web.StreamResponse, extra: Mapping[str, str]) -> None:
    """What the headers of a stream that is open did not say yet: as a comment, since every SSE parser skips it."""
    said, now = opened.headers.get(DEGRADED), extra.get(DEGRADED)
    if now != said:
        await opened.write(f": degraded {now}\n\n".encode() if now else b": no longer degraded\n\n")


async def _choose(context: Context, request: web.Request, found: Route, body: Body, kept: Kept) -> Upstream:
    """By /upstream/{id}, or by the name in the request where that matters. Raises Refused."""
    if found.model is not None:
        return _named(context, found.model)
    only = context.only()
    if only is not None and context.config.unknown_model != "strict":
        return only
    if not context.upstreams:
        raise Refused(Fault(503, "no_model", "no model is configured", "edgellm model list shows what could be", 5.0))
    kept.cover(body)
    await body.read(grow=kept.grow)  # clients may send `model` last
    name = await _name(request, body, found.target)
    if name is None and only is not None:
        return only
    return _named(context, name)


async def _name(request: web.Request, body: Body, target: str) -> str | None:
    """In a thread where looking through the body takes so long that others would wait for it. Raises Refused."""
    data = body.data
    if data is None or len(data) <= _AT_ONCE_BYTES:
        return named_model(data, request.content_type, target)
    return await asyncio.to_thread(named_model, data, request.content_type, target)


def _named(context: Context, name: str | None) -> Upstream:
    upstream = None if name is None else context.by_name(name)
    if upstream is None:
        raise Refused(answers.unknown_model(context, name))
    return upstream


def _would_wait(context: Context, upstream: Upstream, found: Route) -> bool:
    return upstream.endpoint() is None or (found.slot and context.admission.crowded(upstream))


def _patience_s(request: web.Request, most_s: float) -> float:
    """`Edgellm-Max-Wait` in seconds, within what we allow. Raises Refused."""
    asked = request.headers.get("Edgellm-Max-Wait")
    if asked is None:
        return most_s
    try:
        seconds = float(asked)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        fault = Fault(400, "bad_header", "Edgellm-Max-Wait is not a number of seconds", "e.g. Edgellm-Max-Wait: 2")
        raise Refused(fault)
    return min(seconds, most_s)


def _honest(context: Context, upstream: Upstream, extra: Mapping[str, str]) -> Mapping[str, str]:
    """A degraded answer says so; with `strict` there is none. Raises Refused."""
    status = upstream.status()
    if not status.degraded:
        return extra
    less = degraded_header(status)
    if context.config.strict:
        raise Refused(Fault(503, "degraded", f"model {upstream.model_id!r} is degraded: {less}", "edgellm status"))
    return {**extra, DEGRADED: less}
