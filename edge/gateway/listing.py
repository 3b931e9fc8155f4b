"""/v1/models: what the engines that are ready say themselves, and the plan for those that are not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
from aiohttp import web

from edge.gateway import answers, openai
from edge.gateway.context import Context
from edge.gateway.openai import ListedModel
from edge.gateway.refused import Refused
from edge.gateway.routes import Route
from edge.upstream import Endpoint, Upstream

# This list is never held: an engine that is slower than this is described from its plan.
_PATIENCE_S = 1.0


async def answer(context: Context, route: Route) -> web.Response:
    """Raises Refused for a model that is not there."""
    if route.name != "/v1/models/{id}":
        return answers.document(await _document(context))
    name = answers.tail(route)
    upstream = context.by_name(name)
    if upstream is not None:
        listed = await _one(context, upstream)
        found = [entry for entry in listed["data"] if entry.get("id") == upstream.model_id]
        return answers.document((found or listed["data"])[0])
    raise Refused(answers.unknown_model(context, name))


async def _document(context: Context) -> dict[str, Any]:
    documents = await asyncio.gather(*(_one(context, upstream) for upstream in context.upstreams.values()))
    if len(documents) == 1:
        return documents[0]
    return {
        "models": [entry for document in documents for entry in document["models"]],
        "object": "list",
        "data": [entry for document in documents for entry in document["data"]],
    }


async def _one(context: Context, upstream: Upstream) -> dict[str, Any]:
    endpoint = upstream.endpoint()
    said = await _ask(context, upstream, endpoint) if endpoint is not None else None
    if said is not None:
        return said
    planned = ListedModel(upstream.model_id, upstream.aliases, upstream.card)
    return openai.models_document([planned], context.started)


async def _ask(context: Context, upstream: Upstream, endpoint: Endpoint) -> dict[str, Any] | None:
    headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        with context.pools.session(upstream.model_id, endpoint, upstream.slots) as (session, _):
            async with session.get("http://engine/v1/models", headers=headers, timeout=timeout) as response:
                document = json.loads(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
        return None
    lists = isinstance(document, dict) and all(isinstance(document.get(key), list) for key in ("models", "data"))
    return document if lists else None
