"""Handle one request: check host, origin and key, answer it or dispatch it, and record the outcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web

from edge.gateway import answers, keys, listing
from edge.gateway.context import Context
from edge.gateway.openai import Fault
from edge.gateway.passing import dispatch
from edge.gateway.refused import Refused
from edge.gateway.routes import LISTS, Kind, Route, route
from edge.gateway.visit import Visit

log = logging.getLogger("edge.gateway")

CONTEXT = web.AppKey("context", Context)


async def handle(request: web.Request) -> web.StreamResponse:
    """Answer a request of any method and path, and count it however it ends."""
    context = request.app[CONTEXT]
    loop = asyncio.get_running_loop()
    transport = request.transport
    context.connections.request_began(transport)
    record = Visit(request.method, loop.time())
    try:
        response = await _answer(context, request, record)
        record.code = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):  # aiohttp cancels the handler of a client that left
        record.outcome = "gone"
        raise
    finally:
        context.connections.request_ended(transport)
        record.finish(context.stats, loop.time(), context.access_log)


async def _answer(context: Context, request: web.Request, record: Visit) -> web.StreamResponse:
    """Return the answer. The only place where RejectedError becomes one."""
    headers = request.headers
    origin = headers.get("Origin")
    extra = context.origins.cors(origin) if origin is not None else {}
    found = route(request.method, request.raw_path)
    record.route = found.name
    try:
        _check_browser(context, request, origin)
        if request.method == "OPTIONS" and origin is not None and "Access-Control-Request-Method" in headers:
            return web.Response(status=204, headers={**answers.SERVER, **context.origins.preflight(origin, headers)})
        key = _check_key(context, headers, found)
        record.key = key.name if key else None
        record.admin = key is not None and key.admin
        return await _respond(context, request, found, record, extra)
    except Refused as refused:
        record.refused()
        return _rejection(request, refused.fault, extra, record.admin)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        # A bug here must neither end the connection's other requests nor show a traceback to a client.
        log.exception("gateway: %s %s", request.method, found.name)
        record.outcome = "bug"
        return _rejection(request, Fault(500, "bug", "edgellm made a mistake", "edgellm logs has the details"), extra)


def _rejection(request: web.Request, fault: Fault, extra: Mapping[str, str], admin: bool = False) -> web.Response:
    response = answers.fault_response(fault, admin)
    response.headers.extend(extra)
    if request.can_read_body and not request.content.at_eof():
        response.force_close()  # the rest of the body is not read
    return response


def _check_browser(context: Context, request: web.Request, origin: str | None) -> None:
    """Raise RejectedError for a browser that a page of another site sent here."""
    host = request.headers.get("Host")
    fault = context.origins.check_host(host, lambda: _local_address(request))
    if fault is None and origin is not None and request.method != "OPTIONS":
        scheme = "https" if request.secure else "http"
        fault = context.origins.check_origin(request.method, origin, host, scheme)
    if fault is not None:
        raise Refused(fault)


def _local_address(request: web.Request) -> str | None:
    transport = request.transport
    name = transport.get_extra_info("sockname") if transport is not None else None
    return str(name[0]) if isinstance(name, tuple) else None


def _check_key(context: Context, headers: Mapping[str, str], found: Route) -> keys.Key | None:
    """Return the client's key, None where it sent none and none is needed. Raises RejectedError."""
    ring = context.keys
    ring.refresh()
    known = next((key for secret in keys.presented(headers) if (key := ring.find(secret)) is not None), None)
    if found.kind is Kind.REFUSED:
        raise Refused(Fault(403, "refused", "edgellm does not serve this route", "start llama-server by hand for it"))
    if known is None and ring.needed and not (found.kind is Kind.OURS and found.name in answers.PUBLIC):
        raise Refused(Fault(401, "invalid_key", "Invalid API Key", "send Authorization: Bearer KEY"))
    if found.kind is Kind.ADMIN and (known is None or not known.admin):
        raise Refused(Fault(403, "admin_only", "this route needs an admin key", "edgellm key add NAME --admin"))
    return known


async def _respond(
    context: Context, request: web.Request, found: Route, record: Visit, extra: Mapping[str, str]
) -> web.StreamResponse:
    if found.kind is Kind.BAD:
        raise Refused(Fault(400, "bad_path", "this is not a path", None))
    if found.kind is Kind.OURS:
        if found.name in LISTS:
            response = await listing.answer(context, found)
        else:
            response = answers.answer(context, request.method, found, _base_url(request), record.admin)
        response.headers.extend(extra)
        return response
    if context.fault is not None:
        raise Refused(answers.startup_fault(context.fault))
    return await dispatch(context, request, found, record, extra)


def _base_url(request: web.Request) -> str:
    """Return scheme and host as this client names the server."""
    scheme = "https" if request.secure else "http"
    return f"{scheme}://{request.headers.get('Host') or 'localhost'}"
