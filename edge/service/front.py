"""The gateway behind a socket unit: unreadable keys are answered with 503, an exit would be repeated per client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from aiohttp import web

from edge.errors import EdgeError
from edge.gateway.app import make_app
from edge.gateway.settings import GatewayConfig
from edge.service.awaited import failure_of
from edge.status import Failure
from edge.upstream import Upstream


def front(
    upstreams: Mapping[str, Upstream],
    config: GatewayConfig,
    *,
    alive: Callable[[], bool],
    on_fault: Callable[[Failure], None] | None,
) -> web.Application:
    """Return the gateway. On a ConfigError it refuses all requests with the reason; raises it if `on_fault` is None."""
    try:
        return make_app(upstreams, config, alive=alive)
    except EdgeError as error:
        if on_fault is None:
            raise
        fault = failure_of(error)
        on_fault(fault)
        return make_app(upstreams, replace(config, keys_file=None), alive=alive, fault=fault)
