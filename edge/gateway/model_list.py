"""Serve the lists of models: from the engines that are ready, and from the plan of those that are not.

Every id and every alias is an entry. One engine's list without aliases passes unchanged. A model that failed is not
listed: a client takes the list for what it can use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from edge.gateway import headers, openai, own_routes
from edge.gateway.context import Context
from edge.gateway.openai import ListedModel, RejectedError
from edge.gateway.proxy import engine_url
from edge.gateway.routes import LM_STUDIO, ONE_LM_STUDIO, ONE_MODEL, Route
from edge.gateway.waiting_room import failed_fault
from edge.supervisor.status import State
from edge.supervisor.upstream import Upstream

# The list is never held: an engine that takes longer is described from its plan.
_TIMEOUT_S = 1.0


async def answer(context: Context, route: Route) -> web.Response:
    """Return the list, or one model. Raises RejectedError for a model that is unknown or failed."""
    if route.name == LM_STUDIO:
        entries = [each for upstream in _usable(context) for each in _lm_studio(upstream)]
        return own_routes.json_response({"object": "list", "data": entries})
    if route.name not in (ONE_MODEL, ONE_LM_STUDIO):
        return await _all(context, route)
    name = own_routes.name_in_path(route)
    upstream = context.by_name(name)
    if upstream is None:
        raise RejectedError(own_routes.unknown_model(context, name))
    status = upstream.status()
    if status.state is State.FAILED:
        raise RejectedError(failed_fault(status))
    if route.name == ONE_LM_STUDIO:
        data = _lm_studio(upstream)
    else:
        data = _entries(await _fetch(context, upstream, "/v1/models"), context, upstream)[1]
    return own_routes.json_response(next((entry for entry in data if entry.get("id") == name), data[0]))


def _usable(context: Context) -> list[Upstream]:
    return [each for each in context.upstreams.values() if each.status().state is not State.FAILED]


async def _all(context: Context, route: Route) -> web.Response:
    upstreams = _usable(context)
    fetched = await asyncio.gather(*(_fetch(context, upstream, route.target) for upstream in upstreams))
    if len(fetched) == 1 and fetched[0] is not None and not upstreams[0].aliases:
        return fetched[0]
    models: list[Any] = []
    data: list[Any] = []
    for upstream, each in zip(upstreams, fetched, strict=True):
        more_models, more_data = _entries(each, context, upstream)
        models += more_models
        data += more_data
    return own_routes.json_response({"models": models, "object": "list", "data": data})


def _entries(fetched: web.Response | None, context: Context, upstream: Upstream) -> tuple[list[Any], list[Any]]:
    """Return `models` and `data` of one engine, from its plan where its own list is absent or not usable."""
    listed = openai.models_document(
        [ListedModel(upstream.model_id, upstream.aliases, upstream.model_info)], context.started
    )
    if fetched is not None and isinstance(fetched.body, bytes):
        with contextlib.suppress(ValueError):
            document = json.loads(fetched.body)
            models, data = document.get("models", []), document.get("data")
            if isinstance(models, list) and isinstance(data, list) and data:
                listed = document
    models, data = listed.get("models", []), listed["data"]
    if len(data) != 1 or not upstream.aliases:  # llama-server in router mode lists several models of its own
        return models, data
    names = (upstream.model_id, *upstream.aliases)
    return (
        [{**model, "name": name, "model": name} for model in models[:1] for name in names],
        [{**data[0], "id": name, "aliases": list(upstream.aliases)} for name in names],
    )


def _lm_studio(upstream: Upstream) -> list[dict[str, Any]]:
    """Return the entries of LM Studio's /api/v0/models, for the id and each alias."""
    meta, loaded = upstream.model_info, upstream.status().state in (State.READY, State.DRAINING)
    entry = {
        "object": "model",
        "type": "llm",
        "publisher": "",
        "arch": str(meta.get("arch") or ""),
        "compatibility_type": "gguf",
        "quantization": str(meta.get("ftype") or ""),
        "state": "loaded" if loaded else "not-loaded",
        "max_context_length": meta.get("n_ctx_train"),
        "loaded_context_length": meta.get("n_ctx") if loaded else None,
    }
    return [{"id": name, **entry} for name in (upstream.model_id, *upstream.aliases)]


async def _fetch(context: Context, upstream: Upstream, target: str) -> web.Response | None:
    """Return the engine's own answer; None where there is none in time."""
    endpoint = upstream.endpoint()
    if endpoint is None:
        return None
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        with context.pools.session(upstream.model_id, endpoint, upstream.slots) as (session, _):
            async with session.get(engine_url(target), timeout=timeout) as answer:
                body = await answer.read()
                passed = CIMultiDict(headers.to_client(answer.headers.items()))
                return web.Response(body=body, headers=passed) if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return None
