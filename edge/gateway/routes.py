"""Classify a request by method and path. Pure; works on the decoded path, so that no spelling evades a rule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from urllib.parse import unquote_to_bytes


class Kind(Enum):
    OURS = "ours"  # answered by the gateway, never held
    HELD = "held"  # waits for the model, then goes to the engine
    ADMIN = "admin"  # like HELD, needs an admin key
    REFUSED = "refused"
    BAD = "bad"  # not a valid path


@dataclass(frozen=True, slots=True)
class Route:
    """How a request is handled.

    `name` labels metrics and logs, `target` goes to the engine, `model` is set by /upstream/{id}/. `slot`: the request
    runs inference, so it takes one of the engine's slots.
    """

    kind: Kind
    name: str
    target: str = ""
    model: str | None = None
    slot: bool = False


OURS = frozenset(
    {
        "/",
        "/livez",
        "/readyz",
        "/healthz",
        "/metrics",
        "/telemetry",
        "/health",
        "/v1/health",
    }
)
# Read here; a POST to them goes to the engine, which has one in its router mode.
LISTS = frozenset({"/v1/models", "/models", "/v1/models/{id}"})
# llama-server's --tools run shell commands and its CORS proxy fetches any URL: never for a network.
REFUSED = frozenset({"/tools", "/cors-proxy"})
ADMIN = frozenset({"/props", "/lora-adapters"})
# A Prometheus label must not grow with what clients send: all other paths are counted as "other".
NAMED = frozenset(
    {
        "/completion",
        "/completions",
        "/chat/completions",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/embedding",
        "/embeddings",
        "/v1/embeddings",
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
        "/infill",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/props",
        "/slots",
        "/lora-adapters",
    }
)
# Answered by the engine's HTTP threads without a slot. A POST that is not listed here counts as inference.
_LIGHT = frozenset({"/tokenize", "/detokenize", "/apply-template", "/props", "/lora-adapters"})
_LIGHT_ENDS = ("/count_tokens", "/input_tokens", "/control", "/lookup")
_READS = frozenset({"GET", "HEAD"})
_CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_UPSTREAM = "/upstream/"
_CACHED_CHARACTERS = 128
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")


def route(method: str, raw_target: str) -> Route:
    """Classify a request; `raw_target` as in the request line. Never raises."""
    # A few targets make up nearly all requests; long ones are not cached, since clients choose them.
    return _cached(method, raw_target) if len(raw_target) <= _CACHED_CHARACTERS else _route(method, raw_target)


@lru_cache(maxsize=256)
def _cached(method: str, raw_target: str) -> Route:
    return _route(method, raw_target)


def _route(method: str, raw_target: str) -> Route:
    target = _origin_form(raw_target)
    path = plain_path(target)
    if path is None:
        return Route(Kind.BAD, "bad")
    if path.startswith(_UPSTREAM):
        return _upstream_route(method, target)
    if path in OURS or (path in LISTS and method in _READS):
        return Route(Kind.OURS, path, target)
    if path.startswith("/readyz/"):
        return Route(Kind.OURS, "/readyz/{id}", target)
    if path.startswith("/v1/models/") and method in _READS:
        return Route(Kind.OURS, "/v1/models/{id}", target)
    if path.startswith(("/api/", "/v1/api/")) or path in {"/api", "/v1/api"}:
        return Route(Kind.OURS, "/api", target)
    return _engine_route(method, path, target, None)


def _upstream_route(method: str, target: str) -> Route:
    rest = target[len(_UPSTREAM) :] if target.startswith(_UPSTREAM) else ""
    ident, slash, tail = rest.partition("/")
    path = plain_path(slash + tail)
    if not ident or not slash or path is None:
        return Route(Kind.BAD, "bad")
    model = unquote_to_bytes(ident).decode("utf-8", "replace")
    return _engine_route(method, path, slash + tail, model)


def _engine_route(method: str, path: str, target: str, model: str | None) -> Route:
    name = path if path in NAMED else "other"
    bare = "/" + path.strip("/").lower()
    if any(bare == refused or bare.startswith(refused + "/") for refused in REFUSED):
        return Route(Kind.REFUSED, "refused", target, model)
    if method in _CHANGES and (bare in ADMIN or bare == "/slots" or bare.startswith("/slots/")):
        return Route(Kind.ADMIN, "/slots" if bare.startswith("/slots") else bare, target, model)
    slot = method == "POST" and path not in _LIGHT and not path.endswith(_LIGHT_ENDS)
    return Route(Kind.HELD, name, target, model, slot)


def plain_path(target: str) -> str | None:
    """Return the path without query and fragment, percent-decoded, slashes collapsed, dot segments resolved.

    None if it is not valid UTF-8, holds control characters or is not absolute.
    """
    path = target.split("?", 1)[0].split("#", 1)[0]
    if not path.startswith("/"):
        return None
    try:
        decoded = unquote_to_bytes(path).decode() if "%" in path else path
        decoded.encode()
    except UnicodeError:
        return None
    if _FORBIDDEN.search(decoded):
        return None
    if "//" not in decoded and "/." not in decoded:
        return decoded
    parts: list[str] = []
    for part in decoded.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def _origin_form(raw_target: str) -> str:
    """Return `/path` of `http://host/path` (RFC 9112 3.2.2, absolute-form); any other target unchanged."""
    scheme, found, rest = raw_target.partition("://")
    if not found or "/" in scheme or "?" in scheme:
        return raw_target
    slash = rest.find("/")
    return rest[slash:] if slash >= 0 else "/"
