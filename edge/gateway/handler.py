"""Handle one request: check host, origin and key, answer it or dispatch it, and record the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping

from aiohttp import web

from edge.gateway import keys, model_list, own_routes
from edge.gateway.accounting import RequestRecord
from edge.gateway.body import join_chunks
from edge.gateway.context import Context
from edge.gateway.dispatch import dispatch
from edge.gateway.openai import HttpFault, RejectedError
from edge.gateway.origin import is_loopback
from edge.gateway.routes import LISTS, LOG, Kind, Route, of_ollama, route

log = logging.getLogger("edge.gateway")

CONTEXT = web.AppKey("context", Context)


async def handle(context: Context, request: web.Request) -> web.StreamResponse:
    """Answer a request of any method and path, and count it however it ends."""
    loop = asyncio.get_running_loop()
    transport = request.transport
    connection = context.connections.request_began(transport)
    probes_only = connection is not None and connection.probes_only
    record = RequestRecord(request.method, loop.time())
    join_chunks(request)
    try:
        if connection is not None and connection.pipelines:
            await context.connections.turns.request()
        response = await _answer(context, request, record, probes_only)
        record.code = response.status
        if probes_only or (connection is not None and connection.heads.too_heavy):
            response.force_close()
        return response
    except (asyncio.CancelledError, ConnectionError):  # aiohttp cancels the handler of a client that left
        record.outcome = "gone"
        raise
    finally:
        context.connections.request_ended(transport, unread=not request.content.is_eof())
        record.finish(context.stats, loop.time(), context.access_log)


async def _answer(
    context: Context, request: web.Request, record: RequestRecord, probes_only: bool
) -> web.StreamResponse:
    """Return the answer. The only place where RejectedError becomes one."""
    headers = request.headers
    origin = headers.get("Origin")
    loopback = origin is not None and is_loopback(_local_address(request) or "")
    extra = context.origins.cors(origin, loopback=loopback)
    found = route(request.method, request.raw_path)
    record.route = found.name
    try:
        _check_framing(request)
        if probes_only and (found.kind is not Kind.OURS or found.name not in own_routes.PUBLIC):
            raise RejectedError(HttpFault(503, "too_many_connections", "too many connections", "close some", 1.0))
        key = _find_key(context, headers)
        if key is None:  # a page that was sent here under another name cannot know a key
            _check_host(context, request)
        if origin is not None:
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in headers:
                allowed = context.origins.preflight(origin, headers, loopback=loopback)
                return web.Response(status=204, headers={**own_routes.SERVER, **allowed})
            _check_origin(context, request, origin, loopback)
        # After the Origin: a page that may not ask learns nothing of which keys exist.
        _check_key(context, key, found)
        record.key, record.key_hash = (key.name, key.sha256) if key else (None, None)
        record.admin = key is not None and key.admin
        return await _respond(context, request, found, record, extra)
    except RejectedError as refused:
        record.refused()
        return _rejection(request, found, refused.fault, extra, record)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        # A bug here must neither end the connection's other requests nor show a traceback to a client.
        log.exception("gateway: %s %s", request.method, found.name)
        record.outcome = "bug"
        fault = HttpFault(500, "bug", "edgellm made a mistake", "edgellm logs has the details")
        return _rejection(request, found, fault, extra, record)


def _rejection(
    request: web.Request, found: Route, fault: HttpFault, extra: Mapping[str, str], record: RequestRecord
) -> web.Response:
    response = own_routes.fault_response(fault, record.admin, ollama=of_ollama(request.method, found))
    response.headers.extend(extra)
    if fault.kind in _FRAMING or (request.can_read_body and not request.content.at_eof()):
        response.force_close()  # the rest of the body is not read, or its end is not sure
    return response


_FRAMING = frozenset({"transfer_coding", "bad_request"})  # a proxy may see the end of such a body elsewhere


def _check_framing(request: web.Request) -> None:
    """Raise RejectedError for a Transfer-Encoding that nothing here undoes: the engine would get the packed body.

    RFC 9112 6.1: 501 for a coding that is not understood, and in HTTP/1.0, which has none, a broken framing.
    """
    lines = request.headers.getall("Transfer-Encoding", ())
    if not lines:
        return
    if request.version < (1, 1):
        fault = HttpFault(400, "bad_request", "HTTP/1.0 has no Transfer-Encoding", "send a Content-Length")
        raise RejectedError(fault)
    if [coding.strip(" \t").lower() for line in lines for coding in line.split(",")] != ["chunked"]:
        message = f"Transfer-Encoding {', '.join(lines)[:50]!r} is not supported"
        raise RejectedError(
            HttpFault(501, "transfer_coding", message, "send chunked alone; pack with Content-Encoding")
        )


def _check_host(context: Context, request: web.Request) -> None:
    """Raise RejectedError for a browser that reached this server by DNS rebinding."""
    fault = context.origins.check_host(request.headers.get("Host"), lambda: _local_address(request), _own_names)
    if fault is not None:
        raise RejectedError(fault)


def _check_origin(context: Context, request: web.Request, origin: str, loopback: bool) -> None:
    """Raise RejectedError for a page of another site that does more than GET."""
    if request.method == "OPTIONS":
        return
    scheme = "https" if request.secure else "http"
    host = request.headers.get("Host")
    fault = context.origins.check_origin(request.method, origin, host, scheme, loopback=loopback)
    if fault is not None:
        raise RejectedError(fault)


def _own_names() -> set[str]:
    """Return this machine's names, mDNS included, and its addresses. Read each time: DHCP changes both."""
    import psutil

    name = socket.gethostname().lower().rstrip(".")
    short = name.partition(".")[0]
    names = {name, short, f"{short}.local"} if short else set()
    with contextlib.suppress(OSError):
        names.update(each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found)
    return names


def _local_address(request: web.Request) -> str | None:
    transport = request.transport
    name = transport.get_extra_info("sockname") if transport is not None else None
    return str(name[0]) if isinstance(name, tuple) else None


def _find_key(context: Context, headers: Mapping[str, str]) -> keys.Key | None:
    """Return the client's key, None where it sent none that is valid."""
    context.keys.refresh()
    if context.keys.empty:
        return None
    return next((key for secret in keys.presented(headers) if (key := context.keys.find(secret)) is not None), None)


def _check_key(context: Context, key: keys.Key | None, found: Route) -> None:
    """Raise RejectedError if the route needs another key, or is never served."""
    if found.kind is Kind.REFUSED:
        raise RejectedError(
            HttpFault(403, "refused", "edgellm does not serve this route", "start llama-server by hand for it")
        )
    if key is None and context.keys.needed and not (found.kind is Kind.OURS and found.name in own_routes.PUBLIC):
        raise RejectedError(HttpFault(401, "invalid_key", "Invalid API Key", "send Authorization: Bearer KEY"))
    if found.kind in (Kind.ADMIN, Kind.CONTROL) and (key is None or not key.admin):
        raise RejectedError(
            HttpFault(403, "admin_only", "this route needs an admin key", "edgellm key add NAME --admin")
        )


async def _respond(
    context: Context, request: web.Request, found: Route, record: RequestRecord, extra: Mapping[str, str]
) -> web.StreamResponse:
    if found.kind is Kind.BAD:
        raise RejectedError(HttpFault(400, "bad_path", "this is not a path", None))
    if found.kind is Kind.OURS:
        if found.name in LISTS:
            response = await model_list.answer(context, found)
        elif found.name == "/api":
            response = await model_list.ollama(context, request, found, _base_url(request))
        else:
            response = own_routes.answer(context, request.method, found, record.admin)
        response.headers.extend(extra)
        return response
    if found.name == LOG:
        return own_routes.log_lines(context, request.method, found)
    if found.kind is Kind.CONTROL:
        return own_routes.control(context, request.method, found)
    if context.fault is not None:
        raise RejectedError(own_routes.startup_fault(context.fault))
    return await dispatch(context, request, found, record, extra)


def _base_url(request: web.Request) -> str:
    """Return scheme and host as this client names the server."""
    scheme = "https" if request.secure else "http"
    return f"{scheme}://{request.headers.get('Host') or 'localhost'}"
