"""Build the gateway as an aiohttp application with one catch-all handler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from edge.gateway.access_log import AccessLog
from edge.gateway.admission import Admission
from edge.gateway.config import GatewayOptions
from edge.gateway.connections import Connections
from edge.gateway.context import Context, TelemetrySource
from edge.gateway.handler import CONTEXT, handle
from edge.gateway.keys import KeyRing
from edge.gateway.metrics import GatewayCollector
from edge.gateway.origin import OriginPolicy
from edge.gateway.page import Page
from edge.gateway.waiting_room import WaitingQueue
from edge.supervisor.status import Failure
from edge.supervisor.upstream import Upstream


def make_app(
    upstreams: Mapping[str, Upstream],
    config: GatewayOptions | None = None,
    *,
    alive: Callable[[], bool] = lambda: True,
    telemetry: TelemetrySource | None = None,
    fault: Failure | None = None,
    about: Callable[[], Mapping[str, Any]] = dict,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> web.Application:
    """Return an application that serves `upstreams`, by model id; the mapping may change while it runs.

    `alive` returns whether the supervisor's event loop turns. `fault` is set where nothing can be served, for example
    behind an inherited socket with a configuration that cannot be read. `about` names board and engine.
    `app[CONTEXT]` holds what callers extend or control: `metrics.add`, `admission.govern`. Raises ConfigError if the
    key file or the access log cannot be opened.
    """
    config = config or GatewayOptions()
    context = Context(
        upstreams=upstreams,
        config=config,
        alive=alive,
        telemetry=telemetry,
        fault=fault,
        about=about,
        wall=wall,
        monotonic=monotonic,
        origins=OriginPolicy.of(config.hosts, config.cors_origins),
        keys=KeyRing(config.keys_file),
        waiting=WaitingQueue(config.hold_requests, config.hold_bytes),
        admission=Admission(config.queue_requests),
        connections=Connections(config.limits),
        page=Page.load(),
        access_log=AccessLog(config.access_log, as_json=config.log_json),
        started=int(wall()),
    )
    context.metrics.add(
        GatewayCollector(context.stats, upstreams, context.admission, context.waiting, context.access_log)
    )
    app = web.Application()
    app[CONTEXT] = context
    app.router.add_route("*", "/{tail:.*}", handle, expect_handler=_defer_continue)
    app.on_shutdown.append(_stop_waiting)
    app.on_cleanup.append(_close)
    return app


async def _defer_continue(request: web.Request) -> None:
    """Send no `100 Continue` yet: the body's first read does, after keys and limits were checked."""


async def _stop_waiting(app: web.Application) -> None:
    app[CONTEXT].waiting.close()


async def _close(app: web.Application) -> None:
    await app[CONTEXT].pools.close()
    app[CONTEXT].access_log.close()
