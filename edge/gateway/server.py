"""Build the gateway as an aiohttp application, and serve it on sockets that are bound already.

They are inherited from systemd, or were opened before the engine was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from aiohttp import web, web_protocol
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
from edge.gateway.headers import MOST_HEADERS
from edge.gateway.keys import KeyRing
from edge.gateway.metrics import GatewayCollector
from edge.gateway.openai import HttpFault, RejectedError
from edge.gateway.origin import OriginPolicy, is_loopback
from edge.gateway.page import Page
from edge.gateway.turns import ONE_READ_BYTES
from edge.gateway.waiting_room import WaitingQueue
from edge.supervisor.status import Failure
from edge.supervisor.upstream import Upstream
from edge.units import KIB

# Buffered between a client and an engine that reads slowly; aiohttp pauses the socket above twice this.
READ_BYTES = 64 * KIB
web_protocol.MAX_MSG_QUEUE_SIZE = 2  # requests that wait behind another: four of each of 512 clients took 70 MB
BACKLOG = 64  # clients that the kernel lets wait for accept(), where the socket asks for no more by itself
_SPARES = 8
# Connections accepted in an iteration of the loop while clients keep it busy: a probe that came behind 512 others
# waited for as many iterations.
_AT_ONCE_BUSY = 32
_SPARE_AFTER_S = 0.005  # by then the first request of the connection that took the last one has left for the engine
# As asyncio's server: without a free descriptor the socket stays readable, and each try would fail at once.
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_AGAIN_S = 1.0
_NO_PROTOCOL = asyncio.Protocol()  # of a transport that has its own a moment later

_NO_HTTP = HttpFault(400, "bad_request", "this is not a valid HTTP request", "check its start line, headers and chunks")

log = logging.getLogger("edge.gateway")


class _ClientErrorFilter(logging.Filter):
    """Drops tracebacks for what clients do: malformed HTTP gets its 400, a closed connection is counted.

    RejectedError: of a body with broken chunks, whose rest aiohttp reads once more after the answer.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (HttpProcessingError, ConnectionError, RejectedError))


_http_log = logging.getLogger("edge.gateway.http")
_http_log.addFilter(_ClientErrorFilter())


class _Protocol(RequestHandler):
    """aiohttp's protocol whose own error answers have the gateway's envelope and headers."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """End the request whose body has broken framing: aiohttp would let it wait for the rest until its limit."""
        super().data_received(data)
        waiting, seen = self._messages, -1
        # aiohttp's parser (3.14) counts a message whose body came after its head once too often, and from then on stops
        # one message early; it goes on when it is fed. A pipelined request waited for the next byte of its client.
        while seen < len(waiting) < web_protocol.MAX_MSG_QUEUE_SIZE and not _is_broken(waiting):
            seen = len(waiting)
            super().data_received(b"")
        request = self._current_request
        if request is not None and _is_broken(waiting) and not request.content.is_eof():
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


def _is_broken(waiting: Sequence[tuple[object, object]]) -> bool:
    return bool(waiting) and isinstance(waiting[-1][0], _ErrInfo)


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
    app.on_shutdown.append(_stop_waiting)
    app.on_cleanup.append(_close)
    return app


async def _stop_waiting(app: web.Application) -> None:
    app[CONTEXT].waiting.close()


async def _close(app: web.Application) -> None:
    app[CONTEXT].pools.close()
    app[CONTEXT].access_log.close()


class GatewayServer:
    """A running gateway."""

    def __init__(self, runner: web.AppRunner, acceptors: list[Acceptor]) -> None:
        self._runner = runner
        self._acceptors = acceptors

    async def cleanup(self) -> None:
        """Accept no more connections, answer waiting requests with 503, drain streams for a while, close the rest."""
        for acceptor in self._acceptors:
            acceptor.close()
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
    # In place of aiohttp's router, which answers `*`, `host:port` and `/a%0Ab` itself, and `Expect` before the key is
    # checked: the body's first read sends `100 Continue`.
    runner.server.request_handler = cast(Any, partial(handle, context))
    loop = asyncio.get_running_loop()
    make = _ProtocolFactory(runner.server, loop)
    acceptors: list[Acceptor] = []
    for each in sockets:
        # Other processes on this machine reach the unix socket; TLS would add nothing there.
        own_tls = tls if each.family != socket.AF_UNIX else None
        factory = context.connections.protocol(make, own_tls)
        is_busy = context.connections.turns.is_busy
        acceptors.append(Acceptor(loop, each, factory, reads_early=own_tls is None, is_busy=is_busy))
    return GatewayServer(runner, acceptors)


class Acceptor:
    """Accepts the connections of one socket, few in each iteration of the loop, with what their clients have sent.

    asyncio's server makes a task for each and reads three iterations later: 0.05 ms of the first chunk.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        *,
        reads_early: bool,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`reads_early`: the client's first bytes are HTTP, not TLS. While `is_busy` more are accepted at once."""
        self._loop = loop
        self._listener = listener
        self._make = make
        self._reads_early = reads_early
        self._is_busy = is_busy
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(BACKLOG)
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more. May be called twice."""
        if self._again is not None:
            self._again.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE_BUSY if self._is_busy() else 1):
            if not self._accept_next():
                return

    def _accept_next(self) -> bool:
        """Accept a connection. Returns False if there is none, or none can be accepted."""
        try:
            accepted, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            self._loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
            self._loop.remove_reader(self._listener)  # it stays readable
            self._again = self._loop.call_later(_ACCEPT_AGAIN_S, self._loop.add_reader, self._listener, self._accept)
            return False
        accepted.setblocking(False)
        connection = self._make()
        # What create_server() and connect_accepted_socket() call, in Python 3.10 to 3.13.
        made = self._loop._make_socket_transport(accepted, _NO_PROTOCOL, extra={"peername": address})  # type: ignore[attr-defined]
        transport = cast(asyncio.Transport, made)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._reads_early and not transport.is_closing():
            self._read_early(accepted, connection, transport)
        return True

    def _read_early(self, accepted: socket.socket, connection: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Pass on what has arrived by now. What else was seen, an end or an error, the transport sees again."""
        try:
            data = accepted.recv(min(transport.max_size, ONE_READ_BYTES))  # type: ignore[attr-defined]
        except OSError:
            return
        try:
            if data:
                connection.data_received(data)
        except Exception:  # a bug, which the loop logs
            transport.abort()
            raise
        if not transport.is_reading():
            # Python 3.10 begins to read whatever pause_reading() was called before.
            self._loop.call_soon(_pause_again, transport)


def _pause_again(transport: asyncio.Transport) -> None:
    if not transport.is_reading():
        type(transport).resume_reading(transport)  # not Reads', which waits for what was read
        transport.pause_reading()


class _ProtocolFactory:
    """Makes aiohttp's protocols, some ahead of the next clients: 0.06 ms each, parser included."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._spare: list[asyncio.Protocol] = []
        self._refill()

    def __call__(self) -> asyncio.Protocol:
        if not self._spare:
            return self._make()
        spare = self._spare.pop()
        if not self._spare:
            self._loop.call_later(_SPARE_AFTER_S, self._refill)
        return spare

    def _refill(self) -> None:
        self._spare = [self._make() for _ in range(_SPARES)]

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
    context.options |= ssl.OP_NO_RENEGOTIATION  # the default since OpenSSL 3; JetPack 5 has 1.1.1
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
        max_headers=MOST_HEADERS,
        shutdown_timeout=drain_s,
    )
