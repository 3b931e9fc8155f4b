"""Serving on sockets that are bound already: inherited from systemd or opened before the engine was started."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from aiohttp import web
from aiohttp.http import HttpProcessingError

from edge.errors import ConfigError
from edge.gateway.access import is_loopback
from edge.gateway.context import Context
from edge.gateway.handler import CONTEXT
from edge.gateway.settings import GatewayConfig
from edge.units import KIB

# What may wait between a client and an engine that reads slowly.
READ_BYTES = 64 * KIB


log = logging.getLogger("edge.gateway")


class _NoNoise(logging.Filter):
    """No traceback for what clients do: bytes that are no HTTP get their 400, who leaves while we write is counted."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (HttpProcessingError, ConnectionError))


_http_log = logging.getLogger("edge.gateway.http")
_http_log.addFilter(_NoNoise())


# Connections taken in one turn of the loop. Behind a socket unit many may wait that were given up long ago: those are
# seen to have ended, and leave, before the next are taken.
AT_ONCE = 64


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
    """Starts to answer on `sockets`, which are bound and maybe listening.

    Raises ConfigError: an address that others reach needs a key or `insecure`; TLS files that cannot be used.
    """
    context = app[CONTEXT]
    check_addresses(context, sockets)
    _warn(context)
    tls = tls_context(context.config)
    runner = _runner(app, context.config, drain_s)
    await runner.setup()
    factory = context.connections.protocol(_server(runner))
    loop = asyncio.get_running_loop()
    servers: list[asyncio.AbstractServer] = []
    for each in sockets:
        each.setblocking(False)
        wrapped = tls if each.family != socket.AF_UNIX else None
        timeout_s = context.config.limits.header_s if wrapped else None
        server = await loop.create_server(
            factory, sock=each, backlog=AT_ONCE, ssl=wrapped, ssl_handshake_timeout=timeout_s
        )
        servers.append(server)
    return Serving(runner, servers)


def check_addresses(context: Context, sockets: list[socket.socket]) -> None:
    """What a socket is bound to is asked of the socket: an inherited one may be anything. Raises ConfigError."""
    public = [name for name in (_public_name(each) for each in sockets) if name is not None]
    if not public or context.config.insecure or context.fault is not None:  # with a fault there is nothing to guard
        return
    if context.keys.empty:
        message = f"{public[0]} can be reached by other machines, and there is no key"
        raise ConfigError(message, "edgellm key add NAME makes one; --insecure serves everybody")
    context.keys.required = True


def _warn(context: Context) -> None:
    if "*" in context.door.origins and context.keys.empty and context.fault is None:
        log.warning(
            'gateway: cors_origins holds "*" and there is no key: every page that a browser here opens may use this '
            "server; name the origins, or make a key with edgellm key add NAME"
        )


def _public_name(each: socket.socket) -> str | None:
    """The address, unless it is a loopback address or a path."""
    if each.family == socket.AF_UNIX:
        return None
    host, port = each.getsockname()[:2]
    return None if is_loopback(str(host)) else f"{host}:{port}"


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """Raises ConfigError."""
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigError("TLS needs both a certificate and its key", "set tls_cert and tls_key in [gateway]")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error.strerror or "unreadable"
        raise ConfigError(f"cannot use {config.tls_cert}: {why}", "PEM files; the key without a passphrase") from error
    return context


def _runner(app: web.Application, config: GatewayConfig, drain_s: float) -> web.AppRunner:
    return web.AppRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,  # a client who leaves cancels its handler, and with it the work upstream
        auto_decompress=False,  # bytes pass as they are
        access_log=None,
        logger=_http_log,
        read_bufsize=READ_BYTES,
        keepalive_timeout=config.limits.idle_s,
        max_line_size=config.limits.header_field_bytes,
        max_field_size=config.limits.header_field_bytes,
        shutdown_timeout=drain_s,
    )


def _server(runner: web.AppRunner) -> web.Server:
    server = runner.server
    assert server is not None, "setup() makes it"
    return server
