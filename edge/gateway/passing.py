"""Dispatch a request to an engine: choose the model, wait for it and for a slot, proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

from edge.gateway import accesslog, answers
from edge.gateway.body import Body
from edge.gateway.context import Context
from edge.gateway.energy import measured
from edge.gateway.health import DEGRADED, degraded_header
from edge.gateway.heartbeat import INTERVAL_S, Heartbeat
from edge.gateway.hold import Kept
from edge.gateway.intake import acquire_slot
from edge.gateway.names import asks_for_stream, named_model
from edge.gateway.openai import Fault, sse_error
from edge.gateway.proxy import Exchange, forward
from edge.gateway.refused import Refused
from edge.gateway.routes import Route
from edge.gateway.tally import Tally
from edge.gateway.visit import Visit
from edge.units import MIB
from edge.upstream import Upstream

# Above this the search for `model` runs in a thread: 1 MiB takes 0.7 to 2 ms (x86 server), all other requests wait.
_PARSE_INLINE_BYTES = 1 * MIB


async def dispatch(
    context: Context, request: web.Request, found: Route, record: Visit, extra: Mapping[str, str]
) -> web.StreamResponse:
    """Return the engine's answer; `extra` are headers to add to it. Raises RejectedError."""
    body = Body(request, context.config)
    await body.read(context.config.limits.replay_bytes)
    with context.waiting.reserve() as reserved:
        upstream = await _choose(context, request, found, body, reserved)
        record.model = upstream.model_id
        if context.config.log_prompts and body.complete:
            record.prompt = accesslog.prompt(body.data)
        stats = context.stats.model(upstream.model_id)
        record.usage = Tally(record.began_s, stats.between_tokens_s)
        wait_until_s = record.began_s + _max_wait_s(request, context.config.hold_seconds)
        exchange = Exchange(request, upstream, found.target, body, reserved, record, record.usage, wait_until_s, extra)
        heartbeat = _heartbeat(context, exchange, found)
        if heartbeat is None:
            return await _send(context, exchange, found, None)
        async with heartbeat:
            return await _send_with_heartbeat(context, exchange, found, heartbeat)


async def _send(context: Context, exchange: Exchange, found: Route, heartbeat: Heartbeat | None) -> web.StreamResponse:
    """Wait for a slot, end the heartbeat if there is one, and proxy. Raises RejectedError."""
    upstream = exchange.upstream
    stats = context.stats.model(upstream.model_id)
    async with acquire_slot(context.waiting, context.admission, exchange, slot=found.slot) as endpoint:
        exchange.opened = None if heartbeat is None else await heartbeat.stop()
        exchange.extra = _with_degraded(context, upstream, exchange.extra)
        if exchange.opened is not None:
            exchange.record.code = 200
            await _comment_degraded(exchange.opened, exchange.extra)
        stats.in_flight += 1
        try:
            with measured(context.energy if found.slot else None, exchange.record, upstream.model_id):
                return await forward(context.pools, exchange, endpoint)
        finally:
            stats.in_flight -= 1


def _heartbeat(context: Context, exchange: Exchange, found: Route) -> Heartbeat | None:
    """Return the heartbeat of a request that has to wait; `Edgellm-Heartbeat` 1 starts it at once, 0 turns it off."""
    upstream, request = exchange.upstream, exchange.request
    asked, every_s = request.headers.get("Edgellm-Heartbeat"), context.config.heartbeat_s
    at_once = asked == "1"
    if not at_once and (asked == "0" or not found.slot or every_s <= 0):
        return None
    if upstream.endpoint() is not None and not (found.slot and context.admission.crowded(upstream)):
        return None

    def headers() -> Mapping[str, str]:
        status = upstream.status()
        return {**exchange.extra, DEGRADED: degraded_header(status)} if status.degraded else exchange.extra

    def streams() -> bool:
        return at_once or (exchange.body.complete and asks_for_stream(exchange.body.data))

    interval_s = min(INTERVAL_S, every_s or INTERVAL_S) if at_once else every_s
    return Heartbeat(
        request, headers, upstream.status, streams, first_s=0.0 if at_once else every_s, interval_s=interval_s
    )


async def _send_with_heartbeat(
    context: Context, exchange: Exchange, found: Route, heartbeat: Heartbeat
) -> web.StreamResponse:
    try:
        return await _send(context, exchange, found, heartbeat)
    except Refused as refused:
        opened = await heartbeat.stop()
        if opened is None:
            raise
        exchange.record.code = 200
        exchange.record.failed()
        await opened.write(sse_error(exchange.target, refused.fault))
        return opened


async def _comment_degraded(opened: web.StreamResponse, extra: Mapping[str, str]) -> None:
    """Write what the headers of an open stream do not say as an SSE comment."""
    sent, now = opened.headers.get(DEGRADED), extra.get(DEGRADED)
    if now != sent:
        await opened.write(f": degraded {now}\n\n".encode() if now else b": no longer degraded\n\n")


async def _choose(context: Context, request: web.Request, found: Route, body: Body, reserved: Kept) -> Upstream:
    """Return the model by /upstream/{id}, or by the name in the request where it matters. Raises RejectedError."""
    if found.model is not None:
        return _named(context, found.model)
    only = context.only()
    if only is not None and context.config.unknown_model != "strict":
        return only
    if not context.upstreams:
        raise Refused(Fault(503, "no_model", "no model is configured", "edgellm model list shows what could be", 5.0))
    reserved.cover(body)
    await body.read(grow=reserved.grow)  # a client may send `model` as the last member
    name = await _model_name(request, body, found.target)
    if name is None and only is not None:
        return only
    return _named(context, name)


async def _model_name(request: web.Request, body: Body, target: str) -> str | None:
    data = body.data
    if data is None or len(data) <= _PARSE_INLINE_BYTES:
        return named_model(data, request.content_type, target)
    return await asyncio.to_thread(named_model, data, request.content_type, target)


def _named(context: Context, name: str | None) -> Upstream:
    upstream = None if name is None else context.by_name(name)
    if upstream is None:
        raise Refused(answers.unknown_model(context, name))
    return upstream


def _max_wait_s(request: web.Request, most_s: float) -> float:
    """Return `Edgellm-Max-Wait` in seconds, at most `most_s`. Raises RejectedError."""
    value = request.headers.get("Edgellm-Max-Wait")
    if value is None:
        return most_s
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        fault = Fault(400, "bad_header", "Edgellm-Max-Wait is not a number of seconds", "e.g. Edgellm-Max-Wait: 2")
        raise Refused(fault)
    return min(seconds, most_s)


def _with_degraded(context: Context, upstream: Upstream, extra: Mapping[str, str]) -> Mapping[str, str]:
    """Return `extra` and the Edgellm-Degraded header where the model needs it. Raises RejectedError with `strict`."""
    status = upstream.status()
    if not status.degraded:
        return extra
    less = degraded_header(status)
    if context.config.strict:
        raise Refused(Fault(503, "degraded", f"model {upstream.model_id!r} is degraded: {less}", "edgellm status"))
    return {**extra, DEGRADED: less}
