"""Select the headers that pass between client and engine, and count what they hold meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from edge.supervisor.engine_connection import Pairs
from edge.units import KIB, MIB

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


# aiohttp keeps a head until its answer, twice, as bytes and as text; a short line of it takes 200 bytes in objects
# (measured, Python 3.11). 500 clients with 30 KB of cookies took 35 MB, and as much again for each pipelined request.
_LINE_BYTES = 200
MOST_HEADERS = 64  # of a request: a browser behind two proxies sends 45
_ALL_BYTES = 10 * MIB  # of all clients, beside _FREE_BYTES of each
_FREE_BYTES = 8 * KIB


class AllHeads:
    """What the heads of all clients hold beyond _FREE_BYTES of each."""

    def __init__(self) -> None:
        self.kept_bytes = 0


class KeptHeads:
    """What the heads of one client hold, of its request and of those that it has pipelined."""

    def __init__(self, everyone: AllHeads) -> None:
        self._everyone = everyone
        self._bytes = self._pipelined_bytes = 0
        self._is_old = False  # answered; aiohttp's parser keeps a head until it meets the next one

    @property
    def too_heavy(self) -> bool:
        """Whether the connection is better closed than kept with the head of its last request."""
        return self._bytes > _FREE_BYTES and self._everyone.kept_bytes > _ALL_BYTES // 2

    def add(self, part: bytes, *, pipelined: bool = False) -> bool:
        """Count a part of a head. Returns False if it is a large one, and all hold too much together."""
        count = 2 * len(part) + _LINE_BYTES * part.count(b"\n")
        if pipelined:
            self._pipelined_bytes += count
        elif self._is_old:
            self.clear()
        self._set(self._bytes + count)
        return self._bytes <= _FREE_BYTES or self._everyone.kept_bytes <= _ALL_BYTES

    def answered(self) -> None:
        """Keep what was pipelined, the next request's head, or the last one until there is another."""
        if self._pipelined_bytes:
            self._set(self._pipelined_bytes)
            self._pipelined_bytes, self._is_old = 0, False
        else:
            self._is_old = True

    def clear(self) -> None:
        self._pipelined_bytes, self._is_old = 0, False
        self._set(0)

    def _set(self, count: int) -> None:
        self._everyone.kept_bytes += max(0, count - _FREE_BYTES) - max(0, self._bytes - _FREE_BYTES)
        self._bytes = count
