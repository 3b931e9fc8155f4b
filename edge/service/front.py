"""The gateway as a service runs it: keys that cannot be read are answered, not exited with."""

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
    """`on_fault` None (started by hand): raises ConfigError. Else nobody is let in, and everybody is told why."""
    try:
        return make_app(upstreams, config, alive=alive)
    except EdgeError as error:
        if on_fault is None:
            raise
        fault = failure_of(error)
        on_fault(fault)
        return make_app(upstreams, replace(config, keys_file=None), alive=alive, fault=fault)
