"""Who may ask from where: the Host a request names, the page it comes from. Pure.

A page on another site can make a browser send requests here: under its own name, after re-pointing it at this address
(DNS rebinding: the Host is foreign), or across origins (the Origin is foreign). Other programs send neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from edge.gateway.openai import Fault

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_PREFLIGHT_S = "600"


@dataclass(frozen=True, slots=True)
class Door:
    """What is let in. `hosts` holds names without ports, lower case; "*" lets every name in."""

    hosts: frozenset[str]
    origins: frozenset[str]  # "https://chat.example"; "*" is every page

    @staticmethod
    def of(hosts: tuple[str, ...], origins: tuple[str, ...]) -> Door:
        return Door(
            frozenset(host_name(host) for host in hosts), frozenset(each.rstrip("/").lower() for each in origins)
        )

    def check_host(self, host: str | None, local_address: Callable[[], str | None]) -> Fault | None:
        """`local_address`: the address this connection came in at; None on a unix socket, where no browser is."""
        if not host:
            return None  # HTTP/1.0; a browser always names the host
        name = host_name(host)
        if name in _LOOPBACK_NAMES or name.endswith(".localhost") or name in self.hosts or "*" in self.hosts:
            return None
        address = _address(name)
        if address is not None and address.is_loopback:
            return None
        local = local_address()
        if local is None or (address is not None and address == _address(local)):
            return None
        hint = f'add it to hosts in [gateway] of edgellm.toml: hosts = ["{name[:100]}"]'
        return Fault(403, "host_not_allowed", f"this server does not go by the name {name[:100]!r}", hint)

    def check_origin(self, method: str, origin: str | None, host: str | None, scheme: str) -> Fault | None:
        """A page elsewhere may look (it sees nothing without CORS headers) but not act."""
        if origin is None or method in _SAFE_METHODS or self.allows(origin) or _same(origin, host, scheme):
            return None
        hint = f'add it to cors_origins in [gateway] of edgellm.toml: cors_origins = ["{origin[:100]}"]'
        return Fault(403, "origin_not_allowed", f"pages from {origin[:100]!r} may not use this server", hint)

    def allows(self, origin: str) -> bool:
        return origin.isascii() and ("*" in self.origins or origin.lower() in self.origins)

    def cors(self, origin: str | None) -> dict[str, str]:
        """Headers for every answer to a page that is let in."""
        if origin is None or not self.origins:
            return {}
        if not self.allows(origin):
            return {"Vary": "Origin"}
        exposed = "Edgellm-Degraded, Retry-After"
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": exposed}

    def preflight(self, origin: str, headers: Mapping[str, str]) -> dict[str, str]:
        """A browser asks before it sends a key, so this answer cannot depend on one."""
        if not self.allows(origin):
            return {"Vary": "Origin"}
        asked = headers.get("Access-Control-Request-Headers", "*")
        answer = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": asked if asked.isascii() else "*",
            "Access-Control-Max-Age": _PREFLIGHT_S,
            "Vary": "Origin, Access-Control-Request-Headers",
        }
        if headers.get("Access-Control-Request-Private-Network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
        return answer


@lru_cache(maxsize=64)
def host_name(host: str) -> str:
    """`[::1]:8080` → `::1`, `Box.local:80` → `box.local`. Brackets stay off, so that addresses can be compared."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    if colon and ":" not in name and port.isdigit():
        host = name
    return host.rstrip(".")


def is_loopback(address: str) -> bool:
    parsed = _address(address)
    return parsed is not None and parsed.is_loopback


@lru_cache(maxsize=64)  # asked twice with each request; a bound, since clients choose what is asked
def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _same(origin: str, host: str | None, scheme: str) -> bool:
    """Our own status page."""
    return host is not None and origin.lower() == f"{scheme}://{host}".lower()
