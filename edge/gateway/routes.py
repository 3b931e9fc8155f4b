"""Classify a request by method and path. Pure; works on the decoded path, so that no spelling evades a rule."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from urllib.parse import quote, unquote_to_bytes

from msgspec import Struct


class Kind(Enum):
    OURS = "ours"  # answered by the gateway, never held
    HELD = "held"  # waits for the model, then goes to the engine
    ADMIN = "admin"  # like HELD, needs an admin key
    CONTROL = "control"  # answered by the gateway, needs an admin key
    REFUSED = "refused"
    BAD = "bad"  # not a valid path


class Route(Struct, frozen=True):
    """How a request is handled.

    `name` labels metrics and logs, `target` goes to the engine, `path` is that of `target`, decoded, where the engine
    answers. `model` is set by /upstream/{id}/. `slot`: the request runs inference, so it takes one of the engine's
    slots.
    """

    kind: Kind
    name: str
    target: str = ""
    model: str | None = None
    slot: bool = False
    path: str = ""


OURS = frozenset(
    {
        "/",
        "/livez",
        "/readyz",
        "/healthz",
        "/metrics",
        "/telemetry",
        "/starts",
        "/health",
        "/v1/health",
    }
)
# Read here; a POST to them goes to the engine, which has one in its router mode.
ONE_MODEL = "/v1/models/{id}"
LM_STUDIO, ONE_LM_STUDIO = "/api/v0/models", "/api/v0/models/{id}"
LISTS = frozenset({"/v1/models", "/models", ONE_MODEL, LM_STUDIO, ONE_LM_STUDIO})
# Of Ollama: translated, then as the routes of llama-server.
OLLAMA = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"})
_OLLAMA_READS = frozenset({"/api/tags", "/api/ps", "/api/version"})
# LM Studio's first API, and base URLs that end as OpenRouter's do: the same routes as under /v1.
_V1_PREFIXES = ("/api/v0/", "/api/v1/")
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
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
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
# llama-server's README, "Sleeping on Idle"; tools/server/tests/unit/test_sleep.py.
_WAKE_NOTHING = frozenset({"/health", "/props", "/models", "/v1/models"})
_CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_UPSTREAM = "/upstream/"
_CONTROL = "/admin/models/"
LOG = "/admin/log"
_CACHED_CHARACTERS = 128
_PATH_CHARACTERS = "/!$&'()*+,;=:@"  # RFC 3986 3.3: pchar, besides those that quote() never encodes
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\]")


def route(method: str, raw_target: str) -> Route:
    """Classify a request; `raw_target` as in the request line. Never raises."""
    # A few targets make up nearly all requests; long ones are not cached, since clients choose them.
    return _cached(method, raw_target) if len(raw_target) <= _CACHED_CHARACTERS else _route(method, raw_target)


@lru_cache(maxsize=256)
def _cached(method: str, raw_target: str) -> Route:
    return _route(method, raw_target)


def _route(method: str, raw_target: str) -> Route:
    origin = _origin_form(raw_target)
    resolved = _resolve(origin)
    if resolved is None:
        return Route(Kind.BAD, "bad")
    path, target = resolved
    if path.startswith(_UPSTREAM):
        return _upstream_route(method, origin)
    if path.startswith(_V1_PREFIXES) and not path.startswith(LM_STUDIO):
        return _route(method, "/v1/" + quote(path[len(_V1_PREFIXES[0]) :], safe=_PATH_CHARACTERS) + _after_path(target))
    if path == LOG:
        return Route(Kind.CONTROL, LOG, target)
    if path.startswith(_CONTROL):
        return Route(Kind.CONTROL, "/admin/models", target)
    if path in OURS or (path in LISTS and method in _READS):
        return Route(Kind.OURS, path, target)
    if path.startswith("/readyz/"):
        return Route(Kind.OURS, "/readyz/{id}", target)
    for one in (ONE_MODEL, ONE_LM_STUDIO):
        if path.startswith(one.removesuffix("{id}")) and method in _READS:
            return Route(Kind.OURS, one, target)
    if path.startswith(("/api/", "/v1/api/")) or path in {"/api", "/v1/api"}:
        name = path.removeprefix("/v1")
        if name in OLLAMA and method == "POST":
            return Route(Kind.HELD, name, target, slot=True)
        return Route(Kind.OURS, "/api", target)
    return _engine_route(method, path, target, None)


def _upstream_route(method: str, origin: str) -> Route:
    """Split /upstream/{id}/…; the id is decoded on its own, since an alias may hold an encoded slash."""
    rest = origin.lstrip("/")
    ident, slash, tail = rest[len(_UPSTREAM) - 1 :].partition("/")
    resolved = _resolve(slash + tail)
    if not rest.startswith(_UPSTREAM[1:]) or not ident or resolved is None:
        return Route(Kind.BAD, "bad")
    return _engine_route(method, *resolved, unquote_to_bytes(ident).decode("utf-8", "replace"))


def _engine_route(method: str, path: str, target: str, model: str | None) -> Route:
    name = path if path in NAMED else "other"
    # Lower case: a build whose router ignored case must not open a refused route.
    bare = "/" + path.strip("/").lower()
    if any(bare == refused or bare.startswith(refused + "/") for refused in REFUSED):
        return Route(Kind.REFUSED, "refused", target, model)
    if method in _CHANGES and (bare in ADMIN or bare == "/slots" or bare.startswith("/slots/")):
        return Route(Kind.ADMIN, "/slots" if bare.startswith("/slots") else bare, target, model, path=path)
    slot = method == "POST" and path not in _LIGHT and not path.endswith(_LIGHT_ENDS)
    return Route(Kind.HELD, name, target, model, slot, path)


def of_ollama(method: str, found: Route) -> bool:
    """Return whether an error has Ollama's shape. A GET of a path that Ollama lacks may be another API's client."""
    if found.name != "/api":
        return found.name in OLLAMA
    return method not in _READS or (plain_path(found.target) or "").removeprefix("/v1") in _OLLAMA_READS


def wakes(method: str, target: str) -> bool:
    """Return whether a request wakes an engine that sleeps by itself. `target`: as the engine gets it."""
    return method not in _READS or plain_path(target) not in _WAKE_NOTHING


def plain_path(target: str) -> str | None:
    """Return the path without query and fragment: percent-decoded, slashes collapsed, dot segments resolved, and
    without a slash at its end.

    None if it is not valid UTF-8, holds control characters or is not absolute.
    """
    decoded = _decode(_raw_path(target))
    return None if decoded is None else _collapse(decoded)


def _resolve(target: str) -> tuple[str, str] | None:
    """Return the path that rules are applied to, and the target with the same path for the engine.

    The client's own spelling is kept where it decodes to that path. Otherwise the target is written anew: llama-server
    (cpp-httplib) decodes a path but answers 404 for `//v1/models` and for a slash at the end.
    """
    raw = _raw_path(target)
    decoded = _decode(raw)
    if decoded is None:
        return None
    path = _collapse(decoded)
    return path, target if path == decoded else quote(path, safe=_PATH_CHARACTERS) + _after_path(target)


def _raw_path(target: str) -> str:
    return target.split("?", 1)[0].split("#", 1)[0]


def _after_path(target: str) -> str:
    return target[len(_raw_path(target)) :]


def _decode(path: str) -> str | None:
    if not path.startswith("/"):
        return None
    try:
        decoded = unquote_to_bytes(path).decode() if "%" in path else path
        decoded.encode()
    except UnicodeError:
        return None
    return None if _FORBIDDEN.search(decoded) else decoded


def _collapse(path: str) -> str:
    if "//" not in path and "/." not in path:
        return path.rstrip("/") or "/"
    parts: list[str] = []
    for part in path.split("/"):
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
