"""Check the Host and Origin of a request, against DNS rebinding and cross-origin requests of browsers. Pure.

A page of another site can make a browser send requests here: under its own name, after pointing that name at this
address (DNS rebinding: a foreign Host), or across origins (a foreign Origin). Other programs send neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from msgspec import Struct

from edge.gateway.openai import HttpFault
from edge.linux.sockets import split_host_port

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_PREFLIGHT_S = "600"
# Pages of programs on this machine: VS Code's webviews, Electron and Tauri apps. A web site cannot have such an origin.
_APP_SCHEMES = frozenset({"vscode-webview", "vscode-file", "app", "tauri"})


class OriginPolicy(Struct, frozen=True):
    """The names and origins that are allowed. `hosts` holds lower-case names without ports; "*" allows all."""

    hosts: frozenset[str]
    origins: frozenset[str]  # "https://chat.example"; "*" is every page

    @staticmethod
    def of(hosts: tuple[str, ...], origins: tuple[str, ...]) -> OriginPolicy:
        return OriginPolicy(
            frozenset(filter(None, map(host_name, hosts))), frozenset(each.rstrip("/").lower() for each in origins)
        )

    def check_host(
        self,
        host: str | None,
        local_address: Callable[[], str | None],
        own_names: Callable[[], Collection[str]] = tuple,
    ) -> HttpFault | None:
        """Return a fault for a name that is not allowed.

        `local_address` returns the address of the connection's own end; None on a unix socket, which no browser uses.
        `own_names` returns this machine's host names and addresses.
        """
        if not host:
            return None  # HTTP/1.0; a browser always names the host
        name = host_name(host)
        # A site can point its name at 127.0.0.1, but it cannot make the browser send that address as Host.
        if _is_loopback_host(name) or name in self.hosts or "*" in self.hosts:
            return None
        address = _address(name)
        local = local_address()
        if local is None or (address is not None and address == _address(local)):
            return None
        if (name if address is None else str(address)) in own_names():
            return None
        if not name:  # RFC 9112 3.2
            return HttpFault(400, "bad_request", "the Host header is no host and port", None)
        hint = f'add it to hosts in [gateway] of edgellm.toml: hosts = ["{name[:100]}"]'
        return HttpFault(403, "host_not_allowed", f"{name[:100]!r} is not a name of this server", hint)

    def check_origin(
        self, method: str, origin: str | None, host: str | None, scheme: str, *, loopback: bool = False
    ) -> HttpFault | None:
        """Return a fault for a page of another site that does more than GET; answers to GET need CORS to be read."""
        if origin is None or method in _SAFE_METHODS or self.allows(origin, loopback) or _same(origin, host, scheme):
            return None
        hint = f'add it to cors_origins in [gateway] of edgellm.toml: cors_origins = ["{origin[:100]}"]'
        return HttpFault(403, "origin_not_allowed", f"pages from {origin[:100]!r} may not use this server", hint)

    def allows(self, origin: str, loopback: bool = False) -> bool:
        """Return whether pages of `origin` may use the server; `loopback`: the connection came from this machine."""
        if not origin.isascii():
            return False
        return "*" in self.origins or origin.lower() in self.origins or (loopback and _is_local(origin))

    def cors(self, origin: str | None, *, loopback: bool = False) -> dict[str, str]:
        """Return the headers of every answer to a page with `origin`."""
        if origin is None or not (self.origins or loopback):
            return {}
        # Without CORS headers the browser keeps the answer from the page; caches must not mix origins up.
        if not self.allows(origin, loopback):
            return {"Vary": "Origin"}
        exposed = "Edgellm-Degraded, Retry-After"
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": exposed}

    def preflight(self, origin: str, headers: Mapping[str, str], *, loopback: bool = False) -> dict[str, str]:
        """Return the headers that answer a preflight. Browsers send it without a key, so no key is needed."""
        if not self.allows(origin, loopback):
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
    """Return the name in a Host: `[::1]:8080` → `::1`, `Box.local:80` → `box.local`; empty for what is none."""
    host = host.strip().lower()
    found = split_host_port(host)
    if found is None:
        return host if _address(host) is not None else ""  # an IPv6 address without brackets, as some clients send it
    return found[0].rstrip(".")


def _is_local(origin: str) -> bool:
    """Return whether the page belongs to this machine: of a program's own scheme, or of a web server on loopback."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme in _APP_SCHEMES:
        return True
    return parts.scheme in ("http", "https") and _is_loopback_host(name)


@lru_cache(maxsize=64)
def _is_loopback_host(name: str) -> bool:
    if name in _LOOPBACK_NAMES or name.endswith(".localhost") or is_loopback(name):
        return True
    # To Linux 0.0.0.0 is this machine (ip(7)), and clients take it from what a server listens on.
    parsed = _address(name)
    return parsed is not None and parsed.is_unspecified


def is_loopback(address: str) -> bool:
    parsed = _address(address)
    return parsed is not None and parsed.is_loopback


@lru_cache(maxsize=64)  # used twice a request; bounded, since clients choose the text
def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0] if ":" in text else text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _same(origin: str, host: str | None, scheme: str) -> bool:
    """Return whether the page is of this server: the status page."""
    return host is not None and origin.lower() == f"{scheme}://{host}".lower()
