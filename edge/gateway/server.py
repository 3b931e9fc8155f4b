"""Build the gateway as an aiohttp application, and serve it on sockets that are bound already.

They are inherited from systemd, or were opened before the engine was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from edge.errors import ConfigError
from edge.gateway import own_routes
from edge.gateway.access_log import AccessLog
from edge.gateway.admission import Admission
from edge.gateway.config import GatewayOptions
from edge.gateway.connections import Connections
from edge.gateway.context import Context, TelemetrySource
from edge.gateway.handler import CONTEXT, handle
from edge.gateway.keys import KeyRing
from edge.gateway.metrics import GatewayCollector
from edge.gateway.openai import HttpFault, RejectedError
from edge.gateway.origin import OriginPolicy, is_loopback
from edge.gateway.page import Page
from edge.gateway.waiting_room import WaitingQueue
from edge.linux.sockets import AT_ONCE
from edge.supervisor.status import Failure
from edge.supervisor.upstream import Upstream
from edge.units import KIB

# Buffered between a client and an engine that reads slowly; aiohttp pauses the socket above twice this.
READ_BYTES = 64 * KIB
BACKLOG = 64  # clients that the kernel lets wait for accept(), where the socket asks for no more by itself
_SPARE_AFTER_S = 0.005  # by then the first request of the connection that took the last one has left for the engine

_NO_HTTP = HttpFault(400, "bad_request", "this is not a valid HTTP request", "check its start line, headers and chunks")

log = logging.getLogger("edge.gateway")


class _ClientErrorFilter(logging.Filter):
    """Drops tracebacks for what clients do: malformed HTTP gets its 400, a closed connection is counted."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (HttpProcessingError, ConnectionError))


_http_log = logging.getLogger("edge.gateway.http")
_http_log.addFilter(_ClientErrorFilter())


class _Protocol(RequestHandler):
    """aiohttp's protocol whose own error answers have the gateway's envelope and headers."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """End the request whose body has broken framing: aiohttp would let it wait for the rest until its limit."""
        super().data_received(data)
        request, waiting = self._current_request, self._messages
        if request is not None and waiting and isinstance(waiting[-1][0], _ErrInfo) and not request.content.is_eof():
            request.content.set_exception(RejectedError(_NO_HTTP))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Raises ConnectionError if a part of an answer was sent already."""
        super().handle_error(request, status, exc, message)  # logs it
        fault = _NO_HTTP
        if status >= 500:
            fault = HttpFault(status, "bug", "edgellm made a mistake", "edgellm logs has the details")
        answer = own_routes.fault_response(fault)
        answer.force_close()
        return answer


class _Router(web.UrlDispatcher):
    """Resolves every target to the one route: `*`, `host:port` and `/a%0Ab` too, which no pattern matches."""

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        (route,) = self.routes()
        return web.UrlMappingMatchInfo({}, route)


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
        waiting=WaitingQueue(config.hold_requests, config.hold_bytes, upstreams),
        admission=Admission(config.queue_requests, upstreams),
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
    app.router.__class__ = _Router  # a router as an argument is deprecated; _Router adds no attribute
    app.router.add_route("*", "/", handle, expect_handler=_defer_continue)
    app.on_shutdown.append(_stop_waiting)
    app.on_cleanup.append(_close)
    return app


async def _defer_continue(request: web.Request) -> None:
    """Send no `100 Continue` yet: the body's first read does, after keys and limits were checked."""


async def _stop_waiting(app: web.Application) -> None:
    app[CONTEXT].waiting.close()


async def _close(app: web.Application) -> None:
    app[CONTEXT].pools.close()
    app[CONTEXT].access_log.close()


class GatewayServer:
    """A running gateway."""

    def __init__(self, runner: web.AppRunner, servers: list[asyncio.AbstractServer]) -> None:
        self._runner = runner
        self._servers = servers

    async def cleanup(self) -> None:
        """Accept no more connections, answer waiting requests with 503, drain streams for a while, close the rest."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()


async def serve(app: web.Application, sockets: list[socket.socket], *, drain_s: float = 10.0) -> GatewayServer:
    """Start to answer on `sockets`, which are bound and may be listening.

    Raises ConfigError if an address that other machines reach has neither a key nor `insecure`, or if the TLS files
    cannot be used.
    """
    context = app[CONTEXT]
    _raise_descriptor_limit()
    check_addresses(context, sockets)
    _warn_of_open_cors(context)
    tls = tls_context(context.config)
    runner = _runner(app, context.config, drain_s)
    await runner.setup()
    assert runner.server is not None, "setup() makes it"
    loop = asyncio.get_running_loop()
    make = _ProtocolFactory(runner.server, loop)
    servers: list[asyncio.AbstractServer] = []
    for each in sockets:
        each.setblocking(False)
        # Other processes on this machine reach the unix socket; TLS would add nothing there.
        factory = context.connections.protocol(make, tls if each.family != socket.AF_UNIX else None)
        servers.append(await loop.create_server(factory, sock=each, backlog=AT_ONCE))
        each.listen(BACKLOG)
    return GatewayServer(runner, servers)


class _ProtocolFactory:
    """Makes aiohttp's protocols, one ahead of the next client, so that none waits for it: 0.06 ms, parser included."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._spare: asyncio.Protocol | None = self._make()

    def __call__(self) -> asyncio.Protocol:
        spare, self._spare = self._spare, None
        if spare is None:
            return self._make()
        self._loop.call_later(_SPARE_AFTER_S, self._refill)
        return spare

    def _refill(self) -> None:
        if self._spare is None:
            self._spare = self._make()

    def _make(self) -> asyncio.Protocol:
        made = self._server()
        made.__class__ = _Protocol  # web.Server takes no protocol class; _Protocol adds no attribute
        return made


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of open files, 1024 on most systems, to what two sockets a request can need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_addresses(context: Context, sockets: list[socket.socket]) -> None:
    """Require a key on addresses that other machines reach.

    Asks each socket for its address, since an inherited one may be bound to anything. Raises ConfigError.
    """
    public = [name for name in (_public_name(each) for each in sockets) if name is not None]
    if not public or context.config.insecure or context.fault is not None:  # a gateway with a fault serves no model
        return
    if context.keys.empty:
        message = f"{public[0]} can be reached by other machines, and there is no key"
        raise ConfigError(message, "edgellm key add NAME makes one; --insecure serves without keys")
    context.keys.required = True


def _warn_of_open_cors(context: Context) -> None:
    if "*" in context.origins.origins and context.keys.empty and context.fault is None:
        log.warning(
            'gateway: cors_origins holds "*" and there is no key: every page that a browser here opens may use this '
            "server; name the origins, or make a key with edgellm key add NAME"
        )


def _public_name(each: socket.socket) -> str | None:
    """Return HOST:PORT, or None for a loopback address or a path."""
    if each.family == socket.AF_UNIX:
        return None
    host, port = each.getsockname()[:2]
    return None if is_loopback(str(host)) else f"{host}:{port}"


def tls_context(config: GatewayOptions) -> ssl.SSLContext | None:
    """Return the TLS settings, None without `tls_cert` and `tls_key`. Raises ConfigError."""
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


def _runner(app: web.Application, config: GatewayOptions, drain_s: float) -> web.AppRunner:
    return web.AppRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,  # a client that leaves cancels its handler, and with it the work at the engine
        auto_decompress=False,  # bodies pass byte for byte
        access_log=None,
        logger=_http_log,
        read_bufsize=READ_BYTES,
        keepalive_timeout=config.limits.idle_s,
        max_line_size=config.limits.header_field_bytes,
        max_field_size=config.limits.header_field_bytes,
        shutdown_timeout=drain_s,
    )
