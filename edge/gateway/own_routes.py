"""Answer the gateway's own routes, which are never held, from the supervisor's status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

from aiohttp import web

from edge.gateway import health, openai
from edge.gateway.context import Context
from edge.gateway.metrics import CONTENT_TYPE
from edge.gateway.openai import HttpFault, RejectedError
from edge.gateway.routes import Route, plain_path
from edge.gateway.waiting_room import failed_fault, retry_in_s
from edge.linux.files import parse_json
from edge.supervisor.status import Failure, State
from edge.supervisor.upstream import Upstream

# In place of aiohttp's Server header, which names the versions of Python and aiohttp.
SERVER = {"Server": "edgellm"}

Answer = Callable[[Context, Route, bool], web.Response]

_READS = frozenset({"GET", "HEAD"})
_STARTS = 10
# Fields of a start record that any key may see: no path, no board and no sample.
_OF_A_START = (
    *("start_id", "model", "engine", "rung", "outcome", "remembered", "cache_state", "limit"),
    *("spawn_s", "engine_ready_s", "first_token_s", "ready_s", "spans"),
)

# Kubernetes' and systemd's probes carry no keys; the status page asks for one once it is loaded.
PUBLIC = frozenset({"/", "/livez", "/readyz", "/readyz/{id}", "/healthz", "/health", "/v1/health"})


def answer(context: Context, method: str, route: Route, admin: bool) -> web.Response:
    """Return the answer. Raises RejectedError."""
    return _ANSWERS[route.name](context, route, admin) if method in _READS else _get_only(route.name)


def _get_only(name: str) -> web.Response:
    fault = HttpFault(405, "method_not_allowed", f"{name} answers GET only", None)
    return json_response(fault.document(), 405, {"Allow": "GET, HEAD"})


def log_lines(context: Context, method: str, route: Route) -> web.Response:
    """Return log lines that the reader has not seen: edgellm's own, or with `engine=1` the engines'."""
    if method not in _READS:
        return _get_only(route.name)
    if context.history is None:
        return json_response({"schema": 1, "lines": [], "next": {}})
    query = {name: values[-1] for name, values in parse_qs(route.target.partition("?")[2]).items()}
    try:
        since = {str(name): int(count) for name, count in parse_json(query.get("since", "{}")).items()}
    except (ValueError, TypeError, AttributeError):
        raise RejectedError(HttpFault(400, "bad_query", "since is not what `next` was", None)) from None
    found = context.history.log(query.get("engine") == "1", query.get("model"), since)
    return json_response({"schema": 1, **found})


def json_response(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    # A client's bytes that are not UTF-8 are lone surrogates here, which UTF-8 cannot encode.
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    named = {**SERVER, **(headers or {})}
    return web.Response(status=status, body=body, content_type="application/json", charset="utf-8", headers=named)


def fault_response(fault: HttpFault, admin: bool = False, *, ollama: bool = False) -> web.Response:
    """Return the answer of a fault; `ollama`: as Ollama's clients read it."""
    document = {"error": ": ".join(filter(None, (fault.message, fault.hint)))} if ollama else fault.document(admin)
    return json_response(document, fault.status, fault.headers())


def _livez(context: Context, route: Route, admin: bool) -> web.Response:
    alive = context.alive()
    return json_response({"schema": 1, "status": "ok" if alive else "stuck"}, 200 if alive else 503)


def _readyz(context: Context, route: Route, admin: bool) -> web.Response:
    strict = context.config.strict
    statuses = context.statuses()
    ready = bool(statuses) and all(health.serves(status, strict) or health.is_unloaded(status) for status in statuses)
    models = {status.id: health.readyz(status, strict) for status in statuses}
    return json_response({"schema": 1, "ready": ready, "models": models}, *_probe(context, ready))


def _readyz_one(context: Context, route: Route, admin: bool) -> web.Response:
    name = name_in_path(route)
    upstream = context.by_name(name)
    if upstream is None:
        raise RejectedError(unknown_model(context, name))
    status = upstream.status()
    ready = health.serves(status, context.config.strict)
    return json_response(health.readyz(status, context.config.strict), *_probe(context, ready))


def _healthz(context: Context, route: Route, admin: bool) -> web.Response:
    statuses = context.statuses()
    summary = context.telemetry.summary() if context.telemetry else None
    value = health.healthz(statuses, summary, context.wall() - context.monotonic(), context.fault, admin)
    serving = value["status"] == "ok" or (value["status"] == "degraded" and not context.config.strict)
    return json_response(value, *_probe(context, serving))


def _probe(context: Context, ready: bool) -> tuple[int, dict[str, str]]:
    """Return 200, or 503 and Retry-After."""
    if ready:
        return 200, {}
    # The slowest model decides: only then is the whole server ready.
    waits = [retry_in_s(each) for each in context.upstreams.values() if each.endpoint() is None]
    return 503, {"Retry-After": openai.retry_after(max(waits, default=1.0))}


def _health(context: Context, route: Route, admin: bool) -> web.Response:
    """Return llama-server's own document, which its clients poll."""
    statuses = context.statuses()
    if any(health.serves(status, context.config.strict) for status in statuses):
        return json_response({"status": "ok"})
    if context.fault is not None:
        return fault_response(startup_fault(context.fault))
    broken = next((status for status in statuses if status.state is State.FAILED), None)
    return fault_response(failed_fault(broken)) if broken else json_response(openai.LOADING, 503)


def _telemetry(context: Context, route: Route, admin: bool) -> web.Response:
    known = context.telemetry.document() if context.telemetry else {"schema": 1, "source": None}
    recent = [entry.recent() for entry in context.stats.recent]
    return json_response(
        {**known, "about": context.about(), "gateway": _activity(context), "recent": recent, "admin": admin}
    )


def _activity(context: Context) -> dict[str, Any]:
    """Return the requests' figures by model, for the status page."""
    answered: dict[str, int] = {}
    for (_, _, model), count in context.stats.requests.items():
        answered[model] = answered.get(model, 0) + count
    return {
        model: {
            "requests": answered.get(model, 0),
            "in_flight": context.stats.model(model).in_flight,
            "waiting": context.waiting.for_model.get(model, 0),
            "queued": context.admission.queued(model),
            "prompt_tokens": context.stats.model(model).prompt_tokens,
            "completion_tokens": context.stats.model(model).completion_tokens,
            "tokens_per_s": context.stats.model(model).last_per_s,
            "tokens_per_joule": context.energy.tokens_per_joule(model) if context.energy else None,
            "expected_ready_in_s": upstream.expected_ready_in_s(),
            "elapsed_s": upstream.elapsed_s(),
            "model": {name: upstream.model_info.get(name) for name in ("arch", "n_params", "ftype", "n_ctx", "size")},
        }
        for model, upstream in context.upstreams.items()
    }


def _starts(context: Context, route: Route, admin: bool) -> web.Response:
    """Return the stages of the last starts, for the status page; without the paths and samples of their records."""
    found = context.history.starts() if context.history is not None else ()
    shown = [{name: record.get(name) for name in _OF_A_START} for record in found[-_STARTS:]]
    return json_response({"schema": 1, "starts": shown})


def _metrics(context: Context, route: Route, admin: bool) -> web.Response:
    return web.Response(body=context.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE, **SERVER})


def _page(context: Context, route: Route, admin: bool) -> web.Response:
    headers = {"Content-Type": "text/html; charset=utf-8", **SERVER, **context.page.headers()}
    return web.Response(body=context.page.body, headers=headers)


def control(context: Context, method: str, route: Route) -> web.Response:
    """Load, unload or restart a model. Answer at once: `/readyz/{id}` shows what comes of it. Raises RejectedError."""
    name, _, verb = (plain_path(route.target) or "").removeprefix("/admin/models/").rpartition("/")
    upstream = context.by_name(name)
    if upstream is None:
        raise RejectedError(unknown_model(context, name))
    actions = {"load": lambda: _load(context, upstream), "unload": upstream.unload, "restart": upstream.restart}
    if verb not in actions:
        raise RejectedError(HttpFault(404, "unknown_action", f"no action {verb[:50]!r}", "load, unload or restart"))
    if method != "POST":
        fault = HttpFault(405, "method_not_allowed", "actions are POST requests", None)
        return json_response(fault.document(), 405, {"Allow": "POST"})
    actions[verb]()
    return json_response({"schema": 1, "model": upstream.model_id, "action": verb}, 202)


def _load(context: Context, upstream: Upstream) -> None:
    """Start the model as its first request would: other models may have to give memory back before."""
    loading = asyncio.ensure_future(upstream.ensure_ready())
    context.loading.add(loading)  # the event loop keeps no reference to a task
    loading.add_done_callback(context.loading.discard)


def unknown_model(context: Context, name: str | None) -> HttpFault:
    """Return a 404 that lists the ids; a long name is shortened."""
    ids = ", ".join(context.upstreams) or "none yet"
    shown = "no model named" if name is None else f"no model {name[:100]!r}" + ("…" if len(name) > 100 else "")
    return HttpFault(404, "model_not_found", f"{shown}; models here: {ids}", "GET /v1/models lists them", param="model")


def startup_fault(failure: Failure) -> HttpFault:
    """Return the answer of every engine route while nothing can be served."""
    return HttpFault(
        503, failure.kind, f"edgellm cannot serve: {failure.kind}", failure.hint, evidence=failure.evidence
    )


def name_in_path(route: Route) -> str:
    """Return the last part of the path decoded: a model's name."""
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
    "/starts": _starts,
}
