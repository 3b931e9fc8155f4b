"""The gateway as an aiohttp application: one handler, one route table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from aiohttp import web

from edge.gateway.access import Door
from edge.gateway.accessfile import AccessLog
from edge.gateway.admission import Admission
from edge.gateway.connections import Connections
from edge.gateway.context import Context, Telemetry
from edge.gateway.handler import CONTEXT, handle
from edge.gateway.hold import WaitingRoom
from edge.gateway.keyring import KeyRing
from edge.gateway.metrics import GatewayCollector
from edge.gateway.page import Page
from edge.gateway.settings import GatewayConfig
from edge.status import Failure
from edge.upstream import Upstream


def make_app(
    upstreams: Mapping[str, Upstream],
    config: GatewayConfig | None = None,
    *,
    alive: Callable[[], bool] = lambda: True,
    telemetry: Telemetry | None = None,
    fault: Failure | None = None,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> web.Application:
    """`upstreams` by model id, the first is the default; the mapping may change while we run.

    `alive`: does the supervisor's loop turn? `fault`: nothing can be served, and this is why (a configuration that
    cannot be read, behind a socket that others wait on). `app[CONTEXT]` has what others add to or turn: `metrics.add`,
    `admission.govern`. Raises ConfigError when the key file or the access log cannot be opened.
    """
    config = config or GatewayConfig()
    context = Context(
        upstreams=upstreams,
        config=config,
        alive=alive,
        telemetry=telemetry,
        fault=fault,
        wall=wall,
        monotonic=monotonic,
        door=Door.of(config.hosts, config.cors_origins),
        keys=KeyRing(config.keys_file),
        room=WaitingRoom(config.hold_requests, config.hold_bytes),
        admission=Admission(config.queue_requests),
        connections=Connections(config.limits),
        page=Page.load(),
        access_log=AccessLog(config.access_log, as_json=config.log_json),
        started=int(wall()),
    )
    context.metrics.add(GatewayCollector(context.stats, upstreams, context.admission, context.room))
    app = web.Application()
    app[CONTEXT] = context
    app.router.add_route("*", "/{tail:.*}", handle, expect_handler=_expect_later)
    app.on_shutdown.append(_stop_waiting)
    app.on_cleanup.append(_close)
    return app


async def _expect_later(request: web.Request) -> None:
    """100 Continue is said when the body is first read, not before anybody looked at the request."""


async def _stop_waiting(app: web.Application) -> None:
    app[CONTEXT].room.close()


async def _close(app: web.Application) -> None:
    await app[CONTEXT].pools.close()
    app[CONTEXT].access_log.close()
