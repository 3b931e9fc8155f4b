"""One request from its first look to its last byte: who asks, for what, and what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web

from edge.gateway import answers, keys, listing
from edge.gateway.context import Context
from edge.gateway.openai import Fault
from edge.gateway.passing import pass_on
from edge.gateway.refused import Refused
from edge.gateway.routes import LISTS, Kind, Route, route
from edge.gateway.visit import Visit

log = logging.getLogger("edge.gateway")

CONTEXT = web.AppKey("context", Context)


async def handle(request: web.Request) -> web.StreamResponse:
    """Every request. The only place where a refusal becomes an answer."""
    context = request.app[CONTEXT]
    loop = asyncio.get_running_loop()
    transport = request.transport
    context.connections.request_began(transport)
    visit = Visit(request.method, loop.time())
    try:
        response = await _answer(context, request, visit)
        visit.code = response.status
        return response
    except asyncio.CancelledError:
        visit.outcome = "gone"
        raise
    except ConnectionError:
        visit.outcome = "gone"  # it left while we wrote
        raise
    finally:
        context.connections.request_ended(transport)
        visit.record(context.stats, loop.time(), context.access_log)


async def _answer(context: Context, request: web.Request, visit: Visit) -> web.StreamResponse:
    headers = request.headers
    origin = headers.get("Origin")
    extra = context.door.cors(origin) if origin is not None else {}
    found = route(request.method, request.raw_path)
    visit.route = found.name
    try:
        _check_page(context, request, origin)
        if request.method == "OPTIONS" and origin is not None and "Access-Control-Request-Method" in headers:
            return web.Response(status=204, headers={**answers.SERVER, **context.door.preflight(origin, headers)})
        key = _check_key(context, headers, found)
        visit.key = key.name if key else None
        visit.admin = key is not None and key.admin
        return await _dispatch(context, request, found, visit, extra)
    except Refused as refused:
        visit.refused()
        return _refusal(request, refused.fault, extra, visit.admin)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        # A fault of ours must not take the connection's other requests with it, nor show its insides.
        log.exception("gateway: %s %s", request.method, found.name)
        visit.outcome = "bug"
        return _refusal(request, Fault(500, "bug", "edgellm made a mistake", "edgellm logs has the details"), extra)


def _refusal(request: web.Request, fault: Fault, extra: Mapping[str, str], admin: bool = False) -> web.Response:
    response = answers.fault_response(fault, admin)
    response.headers.extend(extra)
    if request.can_read_body and not request.content.at_eof():
        response.force_close()  # the rest of the body is not wanted
    return response


def _check_page(context: Context, request: web.Request, origin: str | None) -> None:
    """Raises Refused for a browser that was sent here by somebody else's page."""
    host = request.headers.get("Host")
    fault = context.door.check_host(host, lambda: _local_address(request))
    if fault is None and origin is not None:
        scheme = "https" if request.secure else "http"
        if request.method != "OPTIONS":
            fault = context.door.check_origin(request.method, origin, host, scheme)
    if fault is not None:
        raise Refused(fault)


def _local_address(request: web.Request) -> str | None:
    transport = request.transport
    name = transport.get_extra_info("sockname") if transport is not None else None
    return str(name[0]) if isinstance(name, tuple) else None


def _check_key(context: Context, headers: Mapping[str, str], found: Route) -> keys.Key | None:
    """Who asks. Raises Refused where a key is needed and this is none."""
    ring = context.keys
    ring.refresh()
    known = next((key for secret in keys.presented(headers) if (key := ring.find(secret)) is not None), None)
    if found.kind is Kind.REFUSED:
        raise Refused(Fault(403, "refused", "edgellm never passes this route on", "start llama-server by hand for it"))
    if known is None and ring.needed and not (found.kind is Kind.OURS and found.name in answers.PUBLIC):
        raise Refused(Fault(401, "invalid_key", "Invalid API Key", "send Authorization: Bearer KEY"))
    if found.kind is Kind.ADMIN and (known is None or not known.admin):
        raise Refused(Fault(403, "admin_only", "this route needs an admin key", "edgellm key add NAME --admin"))
    return known


async def _dispatch(
    context: Context, request: web.Request, found: Route, visit: Visit, extra: Mapping[str, str]
) -> web.StreamResponse:
    if found.kind is Kind.BAD:
        raise Refused(Fault(400, "bad_path", "this is not a path", None))
    if found.kind is Kind.OURS:
        if found.name in LISTS:
            response = await listing.answer(context, found)
        else:
            response = answers.answer(context, request.method, found, _base(request), visit.admin)
        response.headers.extend(extra)
        return response
    if context.fault is not None:
        raise Refused(answers.at_fault(context.fault))
    return await pass_on(context, request, found, visit, extra)


def _base(request: web.Request) -> str:
    """The URL that this client knows us by."""
    scheme = "https" if request.secure else "http"
    return f"{scheme}://{request.headers.get('Host') or 'localhost'}"
