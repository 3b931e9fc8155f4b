"""Our own routes: never held, answered from what the supervisor knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from edge.gateway import health, ollama, openai
from edge.gateway.context import Context
from edge.gateway.hold import failed, retry_in_s
from edge.gateway.metrics import CONTENT_TYPE
from edge.gateway.openai import Fault
from edge.gateway.refused import Refused
from edge.gateway.routes import Route, plain_path
from edge.status import Failure, State

# Not the versions of Python and of the HTTP library.
SERVER = {"Server": "edgellm"}

Answer = Callable[[Context, Route, bool], web.Response]

# Probes carry no keys, and a page cannot ask for one before it is there.
PUBLIC = frozenset({"/", "/livez", "/readyz", "/readyz/{id}", "/healthz", "/health", "/v1/health"})


def answer(context: Context, method: str, route: Route, base: str, admin: bool) -> web.Response:
    """`base`: the URL that the client knows us by. Raises Refused."""
    if route.name == "/api":
        return _ollama(context, method, route, base)
    if method not in ("GET", "HEAD"):
        fault = Fault(405, "method_not_allowed", f"{route.name} answers GET only", None)
        return document(fault.document(), 405, {"Allow": "GET, HEAD"})
    return _ANSWERS[route.name](context, route, admin)


def document(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    # A client's bytes that are no UTF-8 come as lone surrogates; they must not come back as an error of ours.
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    named = {**SERVER, **(headers or {})}
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8", headers=named)


def fault_response(fault: Fault, admin: bool = False) -> web.Response:
    return document(fault.document(admin), fault.status, fault.headers())


def _livez(context: Context, route: Route, admin: bool) -> web.Response:
    alive = context.alive()
    return document({"schema": 1, "status": "ok" if alive else "stuck"}, 200 if alive else 503)


def _readyz(context: Context, route: Route, admin: bool) -> web.Response:
    strict = context.config.strict
    statuses = context.statuses()
    ready = bool(statuses) and all(health.serves(status, strict) or health.rests(status) for status in statuses)
    models = {status.id: health.readyz(status, strict) for status in statuses}
    return document({"schema": 1, "ready": ready, "models": models}, *_probe(context, ready))


def _readyz_one(context: Context, route: Route, admin: bool) -> web.Response:
    name = tail(route)
    upstream = context.by_name(name)
    if upstream is None:
        raise Refused(unknown_model(context, name))
    status = upstream.status()
    ready = health.serves(status, context.config.strict)
    return document(health.readyz(status, context.config.strict), *_probe(context, ready))


def _healthz(context: Context, route: Route, admin: bool) -> web.Response:
    statuses = context.statuses()
    summary = context.telemetry.summary() if context.telemetry else None
    value = health.healthz(statuses, summary, context.wall() - context.monotonic(), context.fault, admin)
    serving = value["status"] == "ok" or (value["status"] == "degraded" and not context.config.strict)
    return document(value, *_probe(context, serving))


def _probe(context: Context, ready: bool) -> tuple[int, dict[str, str]]:
    """200, or 503 with the time after which asking again makes sense."""
    if ready:
        return 200, {}
    waits = [retry_in_s(each) for each in context.upstreams.values() if each.endpoint() is None]
    return 503, {"Retry-After": openai.retry_after(max(waits, default=1.0))}


def _health(context: Context, route: Route, admin: bool) -> web.Response:
    """llama-server's own shape: its clients poll it."""
    statuses = context.statuses()
    if any(health.serves(status, context.config.strict) for status in statuses):
        return document({"status": "ok"})
    if context.fault is not None:
        return fault_response(at_fault(context.fault))
    broken = next((status for status in statuses if status.state is State.FAILED), None)
    return fault_response(failed(broken)) if broken else document(openai.LOADING, 503)


def _telemetry(context: Context, route: Route, admin: bool) -> web.Response:
    known = context.telemetry.document() if context.telemetry else {"schema": 1, "source": None}
    return document({**known, "gateway": _activity(context)})


def _activity(context: Context) -> dict[str, Any]:
    """What the status page shows of the requests, by model."""
    answered: dict[str, int] = {}
    for (_, _, model), count in context.stats.requests.items():
        answered[model] = answered.get(model, 0) + count
    return {
        model: {
            "requests": answered.get(model, 0),
            "in_flight": context.stats.model(model).in_flight,
            "waiting": context.room.waiting.get(model, 0),
            "queued": context.admission.queued(model),
            "prompt_tokens": context.stats.model(model).prompt_tokens,
            "completion_tokens": context.stats.model(model).completion_tokens,
            "tokens_per_s": context.stats.model(model).last_per_s,
        }
        for model in context.upstreams
    }


def _metrics(context: Context, route: Route, admin: bool) -> web.Response:
    return web.Response(body=context.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE, **SERVER})


def _page(context: Context, route: Route, admin: bool) -> web.Response:
    headers = {"Content-Type": "text/html; charset=utf-8", **SERVER, **context.page.headers()}
    return web.Response(body=context.page.body, headers=headers)


def _ollama(context: Context, method: str, route: Route, base: str) -> web.Response:
    path = (plain_path(route.target) or "").removeprefix("/v1").rstrip("/")
    if method in ("GET", "HEAD"):
        if path == "/api/version":
            return document(ollama.version())
        if path == "/api/tags":
            return document(ollama.tags(context.listed(), context.started))
        if path == "/api/ps":
            loaded = {status.id for status in context.statuses() if status.state is State.READY}
            return document(ollama.running([m for m in context.listed() if m.id in loaded], context.started))
    raise Refused(ollama.elsewhere(path or "/api", base))


def unknown_model(context: Context, name: str | None) -> Fault:
    """An OpenAI-shaped 404 that lists the ids. A name that is as long as a page is not repeated."""
    ids = ", ".join(context.upstreams) or "none yet"
    shown = "no model named" if name is None else f"no model {name[:100]!r}" + ("…" if len(name) > 100 else "")
    return Fault(404, "model_not_found", f"{shown}; models here: {ids}", "GET /v1/models lists them", param="model")


def at_fault(failure: Failure) -> Fault:
    return Fault(503, failure.kind, f"edgellm cannot serve: {failure.kind}", failure.hint, evidence=failure.evidence)


def tail(route: Route) -> str:
    """The last part of the path: a model's name, decoded."""
    path = route.target.split("?", 1)[0]
    prefix = route.name[: -len("{id}")]
    return unquote(path.removeprefix(prefix)) if path.startswith(prefix) else (plain_path(path) or "")


_ANSWERS: dict[str, Answer] = {
    "/livez": _livez,
    "/readyz": _readyz,
    "/readyz/{id}": _readyz_one,
    "/healthz": _healthz,
    "/health": _health,
    "/v1/health": _health,
    "/telemetry": _telemetry,
    "/metrics": _metrics,
    "/": _page,
}
