"""Cut the texts of an Ollama client's embedding request to the model's context, as Ollama does.

llama-server refuses a request in which one text is longer, and with it the others: a program that stores the pieces of
a document over Ollama's API relies on the cut.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from aiohttp.client_exceptions import ClientError

from edge.gateway.connection_pool import Pools
from edge.gateway.ollama import OllamaCall
from edge.gateway.proxy import Exchange
from edge.linux.files import parse_json
from edge.supervisor.upstream import Endpoint

# Tokens left for those that the engine adds around a text, and for a cut text that is split into some more again.
_SPARE_TOKENS = 8
# More than any token stands for (runs of 128 blanks in some vocabularies): of 60 MB only what may stay is split.
_TOKEN_CHARACTERS = 256
_TIMEOUT_S = 10.0  # an HTTP thread of the engine answers without a slot; one that hangs is found by the request itself
_JSON = [("Content-Type", "application/json")]


async def cut_texts(pools: Pools, exchange: Exchange, call: OllamaCall, endpoint: Endpoint) -> None:
    """Write the request anew if a text is too long. Where the engine does not answer, it stays as it is."""
    n_ctx = exchange.upstream.model_info.get("n_ctx")
    # A token stands for a byte at least, so nearly all requests need no second look.
    if not call.cuts or not isinstance(n_ctx, int) or len(call.body) <= n_ctx - _SPARE_TOKENS:
        return
    asked = msgspec.json.decode(call.body)
    given = asked["input"]
    texts, most = given if isinstance(given, list) else [given], n_ctx - _SPARE_TOKENS
    if most <= 0 or not any(_may_exceed(text, most) for text in texts):
        return
    with contextlib.suppress(ClientError, OSError, asyncio.TimeoutError, TimeoutError, ValueError, LookupError):
        cut = [await _cut(pools, exchange, endpoint, text, most) if _may_exceed(text, most) else text for text in texts]
        asked["input"] = cut if isinstance(given, list) else cut[0]
        exchange.body.replace(msgspec.json.encode(asked))


def _may_exceed(text: object, most: int) -> bool:
    return isinstance(text, str) and len(text.encode()) > most


async def _cut(pools: Pools, exchange: Exchange, endpoint: Endpoint, text: str, most: int) -> str:
    """Return the text, or what its first tokens stand for. Raises ValueError, LookupError without an answer."""
    text = text[: most * _TOKEN_CHARACTERS]
    tokens = (await _ask(pools, exchange, endpoint, "/tokenize", {"content": text}))["tokens"]
    if len(tokens) <= most:
        return text
    return str((await _ask(pools, exchange, endpoint, "/detokenize", {"tokens": tokens[:most]}))["content"])


async def _ask(pools: Pools, exchange: Exchange, endpoint: Endpoint, target: str, document: object) -> dict[str, Any]:
    return await asyncio.wait_for(_post(pools, exchange, endpoint, target, msgspec.json.encode(document)), _TIMEOUT_S)


async def _post(pools: Pools, exchange: Exchange, endpoint: Endpoint, target: str, body: bytes) -> dict[str, Any]:
    upstream = exchange.upstream
    with pools.connection(upstream.model_id, endpoint, upstream.slots) as connection:
        answer = await connection.request("POST", target, _JSON, body)
        found = parse_json(await answer.read())
    if answer.status != 200 or not isinstance(found, dict):
        raise ValueError(f"{target}: {answer.status}")
    return found
