"""Serving on sockets that are bound already: inherited from systemd or opened before the engine was started."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from edge.gateway.app import CONTEXT
from edge.gateway.settings import GatewayConfig


class Serving:
    """A running gateway."""

    def __init__(self, runner: web.AppRunner, servers: list[asyncio.AbstractServer]) -> None:
        self._runner = runner
        self._servers = servers

    async def cleanup(self) -> None:
        """Takes no new connection, answers who waits with 503, lets streams end for a while, closes everything."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()


async def serve(app: web.Application, sockets: list[socket.socket], *, drain_s: float = 10.0) -> Serving:
    """Starts to answer on `sockets`, which are bound and maybe listening."""
    config = app[CONTEXT].config
    runner = _runner(app, config, drain_s)
    await runner.setup()
    loop = asyncio.get_running_loop()
    servers: list[asyncio.AbstractServer] = []
    for each in sockets:
        each.setblocking(False)
        servers.append(await loop.create_server(_server(runner), sock=each, backlog=1024))
    return Serving(runner, servers)


def _runner(app: web.Application, config: GatewayConfig, drain_s: float) -> web.AppRunner:
    return web.AppRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,  # a client who leaves cancels its handler, and with it the work upstream
        auto_decompress=False,  # bytes pass as they are
        access_log=None,
        keepalive_timeout=config.limits.idle_s,
        max_line_size=config.limits.header_field_bytes,
        max_field_size=config.limits.header_field_bytes,
        shutdown_timeout=drain_s,
    )


def _server(runner: web.AppRunner) -> web.Server:
    server = runner.server
    assert server is not None, "setup() makes it"
    return server
