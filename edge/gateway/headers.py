"""Select the headers that pass between client and engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from edge.supervisor.engine_connection import Pairs

# RFC 9110 7.6.1: these belong to one connection.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Meant for the gateway: the engine has no keys of its own.
_FOR_GATEWAY = frozenset({"authorization", "x-api-key", "expect", "edgellm-max-wait", "edgellm-heartbeat"})
_NOT_UP = HOP_BY_HOP | _FOR_GATEWAY
_OF_ENCODED_BODY = frozenset({"content-encoding", "content-length"})
_CORS = "access-control-"


def to_upstream(headers: Iterable[tuple[str, str]], decoded: bool = False) -> Pairs:
    """Return the client's headers without those of its connection and its key; `decoded`: nor those of its encoding."""
    pairs = list(headers)
    named = _named_by_connection(pairs)
    dropped = _NOT_UP | named | (_OF_ENCODED_BODY if decoded else frozenset())
    return [(name, value) for name, value in pairs if name.lower() not in dropped]


def to_client(headers: Iterable[tuple[str, str]]) -> Pairs:
    """Return the engine's headers without those of its connection and without its CORS answer."""
    pairs = list(headers)
    named = _named_by_connection(pairs)
    return [
        (name, value)
        for name, value in pairs
        if (low := name.lower()) not in HOP_BY_HOP and low not in named and not low.startswith(_CORS)
    ]


def _named_by_connection(pairs: Pairs) -> frozenset[str]:
    """Return the headers that `Connection: close, X-Mine` makes hop-by-hop (RFC 9110 7.6.1)."""
    # Nearly all requests have none: the sets below are not built for them.
    values = [value for name, value in pairs if name.lower() == "connection"]
    if not values:
        return frozenset()
    names = {part.strip().lower() for value in values for part in value.split(",")}
    # A client must not be able to remove the headers that frame the message.
    return frozenset(names - {"content-length", "content-type", "host", "close", "keep-alive", ""})
