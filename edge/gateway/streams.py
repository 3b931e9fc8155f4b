"""Bind the ids of llama-server's resumable streams to the keys that made them.

llama-server keeps the answer to a request with X-Conversation-Id: GET /v1/stream?conv_id=… resumes it, DELETE ends it,
POST /v1/streams/lookup lists those of some ids (tools/server/server-stream.cpp).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from urllib.parse import parse_qs, unquote

from edge.gateway.accounting import RequestRecord
from edge.gateway.body import Body
from edge.gateway.openai import HttpFault, RejectedError
from edge.gateway.routes import plain_path

HEADER = "X-Conversation-Id"
_UNKNOWN = HttpFault(404, "no_stream", "there is no such stream of this key", None)
_FOREIGN = HttpFault(403, "not_your_stream", "this conversation id belongs to another key", None)
_MOST_DECODED = 4  # times an id is percent-decoded: the server does it once at most, a proxy may before


class StreamOwners:
    """The key that made each stream. Bounded for each key, its oldest go first: no key can push out ids of another."""

    MOST = 4096  # of one key; llama-server drops a stream 300 s after its end

    def __init__(self) -> None:
        self._owners: dict[bytes, str] = {}
        self._streams: dict[str, dict[bytes, None]] = {}  # of each key, the oldest first

    def claim(self, stream: str, key: str) -> bool:
        """Record `key` as the owner of a new stream. Returns False if another key owns it."""
        ident = _ident(stream)
        if self._owners.setdefault(ident, key) != key:
            return False
        streams = self._streams.setdefault(key, {})
        streams[ident] = None
        if len(streams) > self.MOST:
            oldest = next(iter(streams))
            del streams[oldest], self._owners[oldest]
        return True

    def owns(self, stream: str, key: str) -> bool:
        return self._owners.get(_ident(stream)) == key


def check_stream(
    owners: StreamOwners, method: str, target: str, made: Iterable[str], body: Body, record: RequestRecord
) -> None:
    """Record the stream that a request makes; drop what its key does not own from a lookup.

    `made`: the values of X-Conversation-Id. An admin key may read and end all. Raises RejectedError for a stream of
    another key.
    """
    key, path, ids = record.key_hash, plain_path(target), list(made)
    assert key is not None
    # The engine takes the one whose spelling sorts first, which need not be the one that is looked at here.
    if len(ids) > 1:
        raise RejectedError(HttpFault(400, "bad_header", f"{HEADER} was sent twice", "send it once"))
    if method == "POST" and ids and not owners.claim(ids[0], key) and not record.admin:
        raise RejectedError(_FOREIGN)
    if record.admin:
        return
    if path == "/v1/stream":
        _check_read(owners, target, body, key, ids)
    elif path == "/v1/streams/lookup":
        _own_ids_only(owners, body, key)


def _check_read(owners: StreamOwners, target: str, body: Body, key: str, made: list[str]) -> None:
    # As aiohttp decodes a header, so that one id is the same bytes in both.
    query = parse_qs(target.partition("?")[2], keep_blank_values=True, errors="surrogateescape")
    asked = [each for name in ("conv_id", "conv") for each in query.get(name, [])] or made
    # cpp-httplib adds the fields of a form to those of the query.
    if not asked or not all(owners.owns(each, key) for each in asked) or not body.complete or body.data:
        raise RejectedError(_UNKNOWN)


def _own_ids_only(owners: StreamOwners, body: Body, key: str) -> None:
    if not body.complete:  # too large to be looked into
        raise RejectedError(HttpFault(413, "body_too_large", "too many conversation ids", "ask for fewer"))
    try:
        ids = [each for each in json.loads(body.data or b"{}")["conversation_ids"] if owners.owns(each, key)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        ids = []
    body.replace(json.dumps({"conversation_ids": ids}).encode())


def _ident(stream: str) -> bytes:
    """Return one identity for all spellings of an id, and for all its streams: llama-server finds ID::MODEL by ID."""
    for _ in range(_MOST_DECODED):
        decoded = unquote(stream, errors="surrogateescape")
        if decoded == stream:
            break
        stream = decoded
    return hashlib.sha256(stream.partition("::")[0].encode("utf-8", "surrogateescape")).digest()
