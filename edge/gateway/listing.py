"""Serve /v1/models: the lists of the engines that are ready, and the plan of those that are not.

One engine's list passes unchanged; the lists of several are joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from edge.gateway import answers, headers, openai
from edge.gateway.context import Context
from edge.gateway.openai import ListedModel
from edge.gateway.proxy import engine_url
from edge.gateway.refused import Refused
from edge.gateway.routes import Route
from edge.upstream import Upstream

# The list is never held: an engine that takes longer is described from its plan.
_TIMEOUT_S = 1.0


async def answer(context: Context, route: Route) -> web.Response:
    """Return the list, or one model. Raises RejectedError for an unknown model."""
    if route.name != "/v1/models/{id}":
        return await _all(context, route)
    name = answers.name_in_path(route)
    upstream = context.by_name(name)
    if upstream is not None:
        data = _entries(await _fetch(context, upstream, "/v1/models"), context, upstream)[1]
        return answers.json_response(next((entry for entry in data if entry.get("id") == upstream.model_id), data[0]))
    raise Refused(answers.unknown_model(context, name))


async def _all(context: Context, route: Route) -> web.Response:
    upstreams = list(context.upstreams.values())
    fetched = await asyncio.gather(*(_fetch(context, upstream, route.target) for upstream in upstreams))
    if len(fetched) == 1 and fetched[0] is not None:
        return fetched[0]
    models: list[Any] = []
    data: list[Any] = []
    for upstream, each in zip(upstreams, fetched, strict=True):
        more_models, more_data = _entries(each, context, upstream)
        models += more_models
        data += more_data
    return answers.json_response({"models": models, "object": "list", "data": data})


def _entries(fetched: web.Response | None, context: Context, upstream: Upstream) -> tuple[list[Any], list[Any]]:
    """Return `models` and `data` of one engine, from its plan where its own list is absent or not usable."""
    if fetched is not None and isinstance(fetched.body, bytes):
        with contextlib.suppress(ValueError):
            document = json.loads(fetched.body)
            models, data = document.get("models", []), document.get("data")
            if isinstance(models, list) and isinstance(data, list) and data:
                return models, data
    planned = openai.models_document([ListedModel(upstream.model_id, upstream.aliases, upstream.card)], context.started)
    return planned["models"], planned["data"]


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
