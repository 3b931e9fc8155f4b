"""The gateway as an aiohttp application: one handler, one route table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from edge.gateway import answers
from edge.gateway.body import Body
from edge.gateway.context import Context
from edge.gateway.hold import Refused, WaitingRoom, failed
from edge.gateway.openai import Fault
from edge.gateway.proxy import Exchange, forward
from edge.gateway.routes import Kind, Route, route
from edge.gateway.settings import GatewayConfig
from edge.status import State
from edge.upstream import Endpoint, Upstream

CONTEXT = web.AppKey("context", Context)


def make_app(
    upstreams: Mapping[str, Upstream],
    config: GatewayConfig | None = None,
    *,
    alive: Callable[[], bool] = lambda: True,
    telemetry: Callable[[], Mapping[str, Any]] | None = None,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> web.Application:
    """`upstreams` by model id, the first is the default; the mapping may change while we run.

    `alive`: does the supervisor's loop turn? `telemetry`: the document behind /telemetry.
    """
    config = config or GatewayConfig()
    room = WaitingRoom(config.hold_requests, config.hold_bytes)
    app = web.Application()
    app[CONTEXT] = Context(upstreams, config, alive, telemetry, wall, monotonic, room, int(wall()))
    app.router.add_route("*", "/{tail:.*}", handle, expect_handler=_expect_later)
    app.on_shutdown.append(_stop_waiting)
    app.on_cleanup.append(_close_pools)
    return app


async def _expect_later(request: web.Request) -> None:
    """100 Continue is said when the body is first read, not before anybody looked at the request."""


async def _stop_waiting(app: web.Application) -> None:
    app[CONTEXT].room.close()


async def _close_pools(app: web.Application) -> None:
    await app[CONTEXT].pools.close()


async def handle(request: web.Request) -> web.StreamResponse:
    """Every request. The only place where a refusal becomes an answer."""
    context = request.app[CONTEXT]
    found = route(request.method, request.raw_path)
    try:
        return await _dispatch(context, request, found)
    except Refused as refused:
        return answers.fault_response(refused.fault)


async def _dispatch(context: Context, request: web.Request, found: Route) -> web.StreamResponse:
    if found.kind is Kind.OURS:
        return answers.answer(context, request.method, found)
    if found.kind is Kind.BAD:
        raise Refused(Fault(400, "bad_path", "this is not a path", None))
    if found.kind is Kind.REFUSED:
        raise Refused(Fault(403, "refused", "edgellm never passes this route on", "start llama-server by hand for it"))
    if found.kind is Kind.ADMIN:
        raise Refused(Fault(403, "admin_only", "this route needs an admin key", "edgellm key add NAME --admin"))
    return await _held(context, request, found)


async def _held(context: Context, request: web.Request, found: Route) -> web.StreamResponse:
    body = Body(request, context.config)
    upstream = _choose(context, found)
    endpoint = upstream.endpoint()
    if endpoint is None:
        endpoint = await _wait(context, upstream, body)
    else:
        await body.read(context.config.limits.replay_bytes)
    return await forward(context.pools, Exchange(request, upstream, found.target, body), endpoint)


def _choose(context: Context, found: Route) -> Upstream:
    if found.model is not None:
        named = context.by_name(found.model)
        if named is None:
            raise Refused(answers.unknown_model(context, found.model))
        return named
    only = context.only()
    if only is None:
        raise Refused(answers.unknown_model(context, None))
    return only


async def _wait(context: Context, upstream: Upstream, body: Body) -> Endpoint:
    status = upstream.status()
    if status.state is State.FAILED:
        raise Refused(failed(status))
    with context.room.seat(upstream) as seat:
        return await seat.until_ready(context.config.hold_seconds, lambda: body.read(grow=seat.grow))
