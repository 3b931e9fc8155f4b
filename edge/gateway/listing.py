"""/v1/models: what the engines that are ready say themselves, and the plan for those that are not.

One engine's list passes as it is; the lists of several are joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from edge.gateway import answers, headers, openai
from edge.gateway.context import Context
from edge.gateway.openai import ListedModel
from edge.gateway.refused import Refused
from edge.gateway.routes import Route
from edge.upstream import Upstream

# This list is never held: an engine that is slower than this is described from its plan.
_PATIENCE_S = 1.0


async def answer(context: Context, route: Route) -> web.Response:
    """Raises Refused for a model that is not there."""
    if route.name != "/v1/models/{id}":
        return await _all(context, route)
    name = answers.tail(route)
    upstream = context.by_name(name)
    if upstream is not None:
        data = _lists(await _ask(context, upstream, "/v1/models"), context, upstream)[1]
        return answers.document(next((entry for entry in data if entry.get("id") == upstream.model_id), data[0]))
    raise Refused(answers.unknown_model(context, name))


async def _all(context: Context, route: Route) -> web.Response:
    upstreams = list(context.upstreams.values())
    said = await asyncio.gather(*(_ask(context, upstream, route.target) for upstream in upstreams))
    if len(said) == 1 and said[0] is not None:
        return said[0]
    models: list[Any] = []
    data: list[Any] = []
    for upstream, each in zip(upstreams, said, strict=True):
        more_models, more_data = _lists(each, context, upstream)
        models += more_models
        data += more_data
    return answers.document({"models": models, "object": "list", "data": data})


def _lists(said: web.Response | None, context: Context, upstream: Upstream) -> tuple[list[Any], list[Any]]:
    """`models` and `data` of one engine; from its plan where it said nothing of use."""
    if said is not None and isinstance(said.body, bytes):
        with contextlib.suppress(ValueError):
            document = json.loads(said.body)
            models, data = document.get("models", []), document.get("data")
            if isinstance(models, list) and isinstance(data, list) and data:
                return models, data
    planned = openai.models_document([ListedModel(upstream.model_id, upstream.aliases, upstream.card)], context.started)
    return planned["models"], planned["data"]


async def _ask(context: Context, upstream: Upstream, target: str) -> web.Response | None:
    """The engine's own answer; None where there is none in time."""
    endpoint = upstream.endpoint()
    if endpoint is None:
        return None
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        with context.pools.session(upstream.model_id, endpoint, upstream.slots) as (session, _):
            async with session.get(URL("http://engine" + target, encoded=True), timeout=timeout) as answer:
                body = await answer.read()
                passed = CIMultiDict(headers.to_client(answer.headers.items()))
                return web.Response(body=body, headers=passed) if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return None
