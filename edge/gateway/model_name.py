"""Find the model that a request names, or that its path means. Used only where it matters: several models, or `strict`.

Pure.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from urllib.parse import parse_qs

import msgspec

from edge.gateway.openai import HttpFault, RejectedError
from edge.supervisor.upstream import Upstream
from edge.units import KIB


def serves(upstream: Upstream, path: str) -> bool:
    """Return whether the model serves a path of the API. llama.cpp answers 404 itself for those that it has not."""
    routes = upstream.routes
    return not routes or any(path == each or (each.endswith("/") and path.startswith(each)) for each in routes)


def only_one(upstreams: Iterable[Upstream], path: str) -> Upstream | None:
    """Return the model that serves a path if there is exactly one; an engine that names the path is meant by it."""
    found = [each for each in upstreams if serves(each, path)]
    if len(found) > 1:
        found = [each for each in found if each.routes]
    return found[0] if len(found) == 1 else None


_FORM_NAME = re.compile(rb'[;\s]name="?model"?(?=[;\s]|$)', re.IGNORECASE)
# An upload of audio has some five parts; a crafted form with a million must not take the time of one.
_FORM_PARTS = 100
_PART_HEAD_BYTES = 4 * KIB
_FORM_NAME_BYTES = 1024
# JSON's whitespace (RFC 8259, section 2).
_BLANKS = b" \t\r\n"
_NAME_BYTES = 64 * KIB
_PIECE_BYTES = 64 * KIB


class _Named(msgspec.Struct, gc=False):
    model: msgspec.Raw = msgspec.Raw(b"")


class _Streamed(msgspec.Struct, gc=False):
    stream: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Named)
_stream_decoder = msgspec.json.Decoder(_Streamed)


def named_model(body: bytes | None, content_type: str, target: str) -> str | None:
    """Return the name from the query, the form or the JSON body, None where there is none.

    Raises RejectedError if the body is not JSON.
    """
    query = target.partition("?")[2].partition("#")[0]
    asked = parse_qs(query).get("model") if query else None
    if asked:
        return asked[0]
    if not body:
        return None
    if content_type.startswith("multipart/"):
        return _form_field(body)
    try:
        raw = _raw_name(body.removeprefix(codecs.BOM_UTF8))
        return _text(raw)
    except (ValueError, RecursionError) as error:
        message = "the request body is not JSON" if isinstance(error, ValueError) else "the body is nested too deeply"
        raise RejectedError(HttpFault(400, "bad_json", message, "send a JSON object in UTF-8", param="body")) from None


def asks_for_stream(body: bytes | None) -> bool:
    """Return whether a JSON body has `"stream": true`."""
    try:
        return body is not None and bytes(_stream_decoder.decode(body).stream) == b"true"
    except (ValueError, RecursionError):
        return False


def _form_field(body: bytes) -> str | None:
    """Return the form's `model`. Only the parts' heads are searched, so the time is linear in the bytes."""
    at = 2 if body.startswith(b"\r\n") else 0
    delimiter, line_end, _ = body[at : at + 256].partition(b"\r\n")
    if not line_end or not delimiter.startswith(b"--"):
        return None
    for _ in range(_FORM_PARTS):
        head_end = body.find(b"\r\n\r\n", at, at + _PART_HEAD_BYTES)
        end = body.find(b"\r\n" + delimiter, head_end + 4)
        if head_end < 0 or end < 0:
            return None
        if _FORM_NAME.search(body, at, head_end):
            value = body[head_end + 4 : min(end, head_end + 4 + _FORM_NAME_BYTES)]
            return value.decode("utf-8", "replace") or None
        at = end + 2
    return None


def _raw_name(body: bytes) -> bytes:
    """Return the JSON of the object's `model`, the last one of several; empty where there is none.

    msgspec skips the other members without creating objects: 20 MB take 5 ms and no memory. Raises ValueError,
    RecursionError.
    """
    _check_utf8(body)
    if body.lstrip(_BLANKS)[:1] != b"{":
        msgspec.json.decode(body, type=msgspec.Raw)
        return b""
    return bytes(_decoder.decode(body).model)


def _text(raw: bytes) -> str | None:
    if not raw.startswith(b'"'):
        return None
    if len(raw) > _NAME_BYTES:  # no model has such a name; its start is enough for the 404
        return raw[1:_NAME_BYTES].decode("utf-8", "replace")
    return msgspec.json.decode(raw, type=str)


def _check_utf8(body: bytes) -> None:
    """Raise ValueError unless the body is UTF-8: msgspec does not check the members that it skips.

    Decodes in pieces, since a str may take four times the bytes.
    """
    if body.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(body)
    for start in range(0, len(body), _PIECE_BYTES):
        decoder.decode(view[start : start + _PIECE_BYTES])
    decoder.decode(b"", final=True)
