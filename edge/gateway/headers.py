"""Which headers pass, in both directions. Pure."""

from __future__ import annotations

from collections.abc import Iterable

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
# Ours to read: the keys open this door, not the engine's.
_FOR_US = frozenset({"authorization", "x-api-key", "expect", "edgellm-max-wait", "edgellm-heartbeat"})
_NOT_UP = HOP_BY_HOP | _FOR_US
_CORS = "access-control-"

Pairs = list[tuple[str, str]]


def to_upstream(headers: Iterable[tuple[str, str]]) -> Pairs:
    """Return the client's headers without its API key and what belongs to its connection."""
    pairs = list(headers)
    named = _named_by_connection(pairs)
    return [(name, value) for name, value in pairs if (low := name.lower()) not in _NOT_UP and low not in named]


def to_client(headers: Iterable[tuple[str, str]]) -> Pairs:
    """The engine's headers without what belongs to its connection and without its CORS answer."""
    pairs = list(headers)
    named = _named_by_connection(pairs)
    return [
        (name, value)
        for name, value in pairs
        if (low := name.lower()) not in HOP_BY_HOP and low not in named and not low.startswith(_CORS)
    ]


def _named_by_connection(pairs: Pairs) -> frozenset[str]:
    """`Connection: close, X-Mine` makes X-Mine a header of this connection as well."""
    values = [value for name, value in pairs if name.lower() == "connection"]
    if not values:
        return frozenset()
    names = {part.strip().lower() for value in values for part in value.split(",")}
    # A client cannot have us drop what frames the message.
    return frozenset(names - {"content-length", "content-type", "host", "close", "keep-alive", ""})
