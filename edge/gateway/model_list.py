"""Serve the lists of models, in OpenAI's, LM Studio's and Ollama's shapes.

An engine that is ready describes its model itself, the plan describes the others. Every id and every alias is an entry.
One engine's list without aliases passes unchanged. A model that failed is not listed: a client takes the list for what
it can use.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.client_exceptions import ClientError
from multidict import CIMultiDict

from edge.errors import EdgeError
from edge.gateway import headers, openai, own_routes
from edge.gateway.body import Body
from edge.gateway.context import Context
from edge.gateway.openai import HttpFault, ListedModel, RejectedError
from edge.gateway.routes import LM_STUDIO, ONE_LM_STUDIO, ONE_MODEL, Route, plain_path
from edge.gateway.waiting_room import failed_fault
from edge.linux.files import parse_json
from edge.linux.timeouts import DeadlineExceeded, in_thread
from edge.supervisor.engine_connection import DOCUMENT_BYTES, EngineAnswer
from edge.supervisor.status import State
from edge.supervisor.upstream import Endpoint, Upstream

# The list is never held: an engine that takes longer is described from its plan.
_TIMEOUT_S = 1.0
_HEADER_S = 5.0  # for a file's header: 40 ms of CPU time (Xeon), on a slow disk and a busy board many times that
_LONGEST_S = 9e9  # 285 years; a ttl_s may be longer than dates are
# The version of Ollama whose API this is. VS Code wants 0.6.4 or newer; `think` and `capabilities` came by 0.9.
OLLAMA_VERSION = "0.12.6"
_COMMANDS = {
    "/api/pull": "edgellm model pull NAME",
    "/api/create": "edgellm model import FILE",
    "/api/delete": "edgellm model remove NAME",
    "/api/copy": "add an alias to [[model]] in edgellm.toml",
}


async def answer(context: Context, route: Route) -> web.Response:
    """Return the list, or one model. Raises RejectedError for a model that is unknown or failed."""
    if route.name == LM_STUDIO:
        entries = [each for upstream in _of_llama(context) for each in _lm_studio(upstream)]
        return own_routes.json_response({"object": "list", "data": entries})
    if route.name not in (ONE_MODEL, ONE_LM_STUDIO):
        return await _all(context, route)
    name = own_routes.name_in_path(route)
    upstream = context.by_name(name)
    if upstream is None:
        raise RejectedError(own_routes.unknown_model(context, name))
    _check_usable(upstream)
    if route.name == ONE_LM_STUDIO:
        data = _lm_studio(upstream)
    else:
        data = _entries(await _fetch(context, upstream, "/v1/models"), context, upstream)[1]
    return own_routes.json_response(next((entry for entry in data if entry.get("id") == name), data[0]))


def _check_usable(upstream: Upstream) -> None:
    status = upstream.status()
    if status.state is State.FAILED:
        raise RejectedError(failed_fault(status))


def _usable(context: Context) -> list[Upstream]:
    return [each for each in context.upstreams.values() if each.status().state is not State.FAILED]


def _of_llama(context: Context) -> list[Upstream]:
    """Return what Ollama's and LM Studio's clients may use: they take every entry for a language model."""
    return [each for each in _usable(context) if each.routes is None]


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
        data += [{**entry, "edgellm": _residency(upstream)} for entry in more_data]
    return own_routes.json_response({"models": models, "object": "list", "data": data})


def _entries(fetched: web.Response | None, context: Context, upstream: Upstream) -> tuple[list[Any], list[Any]]:
    """Return `models` and `data` of one engine, from its plan where its own list is absent or not usable."""
    listed = openai.models_document(
        [ListedModel(upstream.model_id, upstream.aliases, upstream.model_info)], context.started
    )
    if fetched is not None and isinstance(fetched.body, bytes):
        with contextlib.suppress(ValueError, AttributeError):
            document = parse_json(fetched.body)
            models, data = document.get("models", []), document.get("data")
            if isinstance(models, list) and isinstance(data, list) and data:
                listed = document if all(isinstance(row, dict) for row in (*models, *data)) else listed
    models, data = listed.get("models", []), listed["data"]
    # The engine is started with the id alone, so its list has one entry.
    if len(data) != 1 or not upstream.aliases:  # llama-server in router mode lists several models of its own
        return models, data
    names = _names(upstream)
    return (
        [{**model, "name": name, "model": name} for model in models[:1] for name in names],
        [{**data[0], "id": name, "aliases": list(upstream.aliases)} for name in names],
    )


def _residency(upstream: Upstream) -> dict[str, Any]:
    """Return what a client may choose by among several models: whether one is in memory, its size, its last load."""
    load_s, size = upstream.last_load_s, upstream.model_info.get("size")
    return {
        "state": upstream.status().state.value,
        "size_bytes": size if isinstance(size, int) else None,
        "last_load_s": None if load_s is None else round(load_s, 2),
    }


def _lm_studio(upstream: Upstream) -> list[dict[str, Any]]:
    """Return the entries of LM Studio's /api/v0/models, for the id and each alias."""
    meta, loaded = upstream.model_info, upstream.status().state in (State.READY, State.DRAINING)
    entry = {
        "object": "model",
        "type": _lm_studio_type(meta),
        "publisher": "",
        "arch": str(meta.get("arch") or ""),
        "compatibility_type": "gguf",
        "quantization": str(meta.get("ftype") or ""),
        "state": "loaded" if loaded else "not-loaded",
        "max_context_length": meta.get("n_ctx_train"),
        "loaded_context_length": meta.get("n_ctx") if loaded else None,
    }
    return [{"id": name, **entry} for name in _names(upstream)]


def _lm_studio_type(meta: Mapping[str, Any]) -> str:
    """Return llm, vlm or embeddings: LM Studio knows no fourth, so a reranker is of those that cannot chat."""
    capabilities = meta.get("capabilities") or ("completion",)
    if "completion" not in capabilities:
        return "embeddings"
    return "vlm" if "vision" in capabilities else "llm"


async def ollama(context: Context, request: web.Request, route: Route, base: str) -> web.Response:
    """Answer Ollama's routes that need no engine; `base` is the URL of this server. Raises RejectedError."""
    path = (plain_path(route.target) or "").removeprefix("/v1")
    if request.method in ("GET", "HEAD"):
        if path == "/api/version":
            return own_routes.json_response({"version": OLLAMA_VERSION})
        if path == "/api/tags":
            found = [_ollama_entry(context, each, name) for each in _of_llama(context) for name in _names(each)]
            return own_routes.json_response({"models": found})
        if path == "/api/ps":
            ready = [each for each in _of_llama(context) if each.status().state is State.READY]
            return own_routes.json_response({"models": [_loaded_entry(context, each) for each in ready]})
    elif path in ("/api/show", "/api/pull"):
        name = await _asked_model(context, request)
        upstream = context.by_name(name)
        if upstream is not None:
            if path == "/api/show":
                _check_usable(upstream)
                return own_routes.json_response(await _shown(context, upstream))
            return own_routes.json_response({"status": "success"})  # it is here
        if path == "/api/show":
            raise RejectedError(own_routes.unknown_model(context, name))
    command = _COMMANDS.get(path)
    if command is not None:
        raise RejectedError(
            HttpFault(403, "not_by_api", f"{path[len('/api/') :]} is not done through the API", command)
        )
    message = f"edgellm has no {path[:100]}"
    raise RejectedError(HttpFault(404, "no_ollama_api", message, f"OpenAI clients use the base URL {base}/v1"))


async def _asked_model(context: Context, request: web.Request) -> str:
    body = Body(request, context.config, context.connections)
    with context.waiting.reserve() as reserved:
        arrive = partial(reserved.arrive, make_room=context.connections.end_slow_upload)
        await body.read(context.config.limits.replay_bytes, arrive)
    with contextlib.suppress(ValueError, RecursionError):
        asked = json.loads(body.data or b"")
        if isinstance(asked, dict):
            return str(asked.get("model") or asked.get("name") or "")
    raise RejectedError(HttpFault(400, "bad_json", "the request body is not a JSON object", None))


def _names(upstream: Upstream) -> tuple[str, ...]:
    return (upstream.model_id, *upstream.aliases)


def _ollama_entry(context: Context, upstream: Upstream, name: str) -> dict[str, Any]:
    size = upstream.model_info.get("size")
    return {
        "name": name,
        "model": name,
        "modified_at": _moment(context.started),
        "size": size if isinstance(size, int) else 0,
        "digest": _digest(upstream),
        "details": _details(upstream.model_info),
    }


def _digest(upstream: Upstream) -> str:
    """Return a name of 64 hex digits for this model: `ollama list` prints the first twelve, and ends if there are less.

    Ollama's is the hash of a manifest, which no file here has.
    """
    known = [upstream.model_id, *(str(upstream.model_info.get(name)) for name in ("size", "ftype", "n_params"))]
    return hashlib.sha256("\0".join(known).encode()).hexdigest()


def _loaded_entry(context: Context, upstream: Upstream) -> dict[str, Any]:
    """Return an entry of /api/ps. `expires_at`: when the model sleeps if no request comes."""
    left_s = upstream.sleeps_in_s()
    # As Ollama shows keep_alive -1; its clients parse a date here.
    expires = "2318-01-01T00:00:00Z"
    if left_s is not None and left_s < _LONGEST_S:
        expires = _moment(context.wall() + left_s)
    entry = _ollama_entry(context, upstream, upstream.model_id)
    info = upstream.model_info
    sizes = {"size_vram": info.get("size_vram") or 0, "context_length": info.get("n_ctx") or 0}
    return {**entry, "expires_at": expires, **sizes}


def _details(meta: Mapping[str, Any]) -> dict[str, Any]:
    parameters, family = meta.get("n_params"), str(meta.get("arch") or "llama")
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _parameters(parameters) if isinstance(parameters, (int, float)) else "",
        "quantization_level": str(meta.get("ftype") or ""),
    }


def _parameters(number: float) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"


async def _shown(context: Context, upstream: Upstream) -> dict[str, Any]:
    """Return /api/show: what a client needs to offer the model, the context being the plan's."""
    meta = upstream.model_info
    arch = str(meta.get("arch") or "llama")
    info = {
        "general.architecture": arch,
        "general.basename": upstream.model_id,
        "general.parameter_count": meta.get("n_params"),
        f"{arch}.context_length": meta.get("n_ctx") or meta.get("n_ctx_train"),
        f"{arch}.embedding_length": meta.get("n_embd"),
        f"{arch}.vocab_size": meta.get("n_vocab"),
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "modified_at": _moment(context.started),
        "details": _details(meta),
        "model_info": {name: value for name, value in info.items() if value is not None},
        "capabilities": await _capabilities(context, upstream),
    }


async def _capabilities(context: Context, upstream: Upstream) -> list[str]:
    """Return Ollama's names of what the model can do: from the plan, and from the template.

    That is in the engine's /props if it is ready, otherwise in the header of the file.
    """
    found = list(upstream.model_info.get("capabilities") or ["completion"])
    if "completion" not in found:
        return found
    fetched = await _fetch(context, upstream, "/props")
    if fetched is None or not isinstance(fetched.body, bytes):
        return [*found, *(name for name in await _of_header(upstream.template_file) if name not in found)]
    # Older llama.cpp has no chat_template_caps: the text of the template is looked through then.
    with contextlib.suppress(ValueError, AttributeError):
        props = parse_json(fetched.body)
        template = str(props.get("chat_template") or "")
        can = {
            "tools": (props.get("chat_template_caps") or {}).get("supports_tools", "tools" in template),
            "thinking": _thinks(template),
            "vision": (props.get("modalities") or {}).get("vision"),
        }
        found += [name for name, there in can.items() if there and name not in found]
    return found


def _thinks(template: str) -> bool:
    return any(word in template for word in ("<think>", "enable_thinking", "reasoning_content"))


async def _of_header(path: str | None) -> tuple[str, ...]:
    """Return what the chat templates in the header of a GGUF file can; empty if it cannot be read in time."""
    if path is None:
        return ()
    with contextlib.suppress(OSError, EdgeError, DeadlineExceeded):
        return await in_thread(lambda: _of_file(path, Path(path).stat().st_mtime_ns), _HEADER_S)
    return ()


@lru_cache(maxsize=64)
def _of_file(path: str, mtime_ns: int) -> tuple[str, ...]:
    """Read a header. Kept by the file's time, since a client may ask often. Raises VerdictError, OSError."""
    from edge.models.header import read_templates  # not at a start whose plan is remembered

    template = "\n".join(read_templates(Path(path)).values())
    can = {"tools": "tools" in template, "thinking": _thinks(template)}
    return tuple(name for name, there in can.items() if there)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


async def _fetch(context: Context, upstream: Upstream, target: str) -> web.Response | None:
    """Return the engine's own answer; None where there is none in time."""
    endpoint = upstream.endpoint()
    if endpoint is None or upstream.routes is not None:
        return None
    try:
        answer = await asyncio.wait_for(_get(context, upstream, endpoint, target), _TIMEOUT_S)
    except (ClientError, OSError, asyncio.TimeoutError):
        return None
    passed = CIMultiDict(headers.to_client(answer.headers.items()))
    return web.Response(body=await answer.read(), headers=passed) if answer.status == 200 else None


async def _get(context: Context, upstream: Upstream, endpoint: Endpoint, target: str) -> EngineAnswer:
    with context.pools.connection(upstream.model_id, endpoint, upstream.slots) as connection:
        answer = await connection.request("GET", target, [], None)
        await answer.read(DOCUMENT_BYTES)
        return answer
