"""The public sockets: inherited from systemd, or bound before the plan is made, so that requests wait from then on."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edge.errors import AddressInUseError, ConfigError, UnavailableError
from edge.linux.tree import parse_count

FIRST_INHERITED = 3  # SD_LISTEN_FDS_START of sd-daemon.h
DEFAULT_PORT = 8080
BACKLOG = 1024  # connections that wait in the kernel until the gateway accepts; capped by net.core.somaxconn
# Connections accepted in one turn of the event loop. asyncio goes on until there is none, which it learns from a failed
# accept (16 µs here) before it reads the one it has; without a free descriptor each further try fails and logs again.
# One also lets a client that has given up behind a socket unit be seen to have ended before the next is accepted.
AT_ONCE = 1

# RFC 3986 3.2.2: an IPv6 address stands in brackets, and nothing else does; its zone is spelled as for getaddrinfo(3).
_HOST_PORT = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[^\x00-\x20\x7f\[\]/?#@:]+)?)\]"
    r"|(?P<name>[^\x00-\x20\x7f\[\]:/?#@]*))(?::(?P<port>[0-9]{0,5}))?"
)


class Listener(socket.socket):
    """A socket whose backlog cannot shrink.

    asyncio calls listen() again with the number of connections that it accepts in one turn of its loop.
    """

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(max(backlog, BACKLOG))


class Listeners(NamedTuple):
    """The public sockets of one start. `inherited`: a socket unit of systemd opened them."""

    sockets: list[socket.socket]
    inherited: bool

    def urls(self, *, tls: bool) -> list[str]:
        return [url(each, tls) for each in self.sockets]


def network_addresses(family: socket.AddressFamily) -> list[str]:
    """Return this machine's addresses of a family that other machines may reach: no loopback, no link-local ones."""
    import psutil  # not before the spawn

    found = [each.address for rows in psutil.net_if_addrs().values() for each in rows if each.family == family]
    return [each for each in found if not each.startswith(("127.", "169.254.", "fe80:")) and each != "::1"]


def inherited(env: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the sockets of sd_listen_fds(3) and unset its variables, so that children do not inherit them."""
    pid, count = env.pop("LISTEN_PID", ""), env.pop("LISTEN_FDS", "")
    env.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()):
        return []
    sockets: list[socket.socket] = []
    for descriptor in range(FIRST_INHERITED, FIRST_INHERITED + (parse_count(count) or 0)):
        os.set_inheritable(descriptor, False)
        sockets.append(Listener(fileno=descriptor))
    return sockets


def split_host_port(text: str) -> tuple[str, int | None] | None:
    """Split `name:80`, `10.0.0.1`, `[::1]:80`; the host without brackets, port None where there is none.

    Returns None for everything else: every address of a setting and of a Host header is read here.
    """
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        return None
    port = int(match["port"]) if match["port"] else None
    return (match["v6"] or match["name"], port) if port is None or port <= 65535 else None


def parse_address(text: str) -> tuple[str, int]:
    """Split `127.0.0.1:8080`, `[::1]:8080`, `0.0.0.0`, `:8080` or `8080` (both loopback). Raises ConfigError.

    `http://` before it and a slash behind it are allowed, as in Ollama's OLLAMA_HOST.
    """
    plain = text.strip().removeprefix("http://").removesuffix("/")
    found = split_host_port(f":{plain}" if plain.isdigit() else plain)
    if found is None or found == ("", None) or plain.endswith(":"):
        raise ConfigError(f"not an address: {text[:100]!r}", "write it like 127.0.0.1:8080 or [::1]:8080")
    host, port = found
    return host or "127.0.0.1", DEFAULT_PORT if port is None else port


def only_this_machine(addresses: Sequence[str]) -> bool:
    """Return whether all addresses are loopback ones; False for what is no address."""
    try:
        hosts = [parse_address(text)[0] for text in addresses]
    except ConfigError:
        return False
    # Not by the module ipaddress: its import takes milliseconds before the engine is spawned.
    return all(host in ("localhost", "::1") or _in_127(host) for host in hosts)


def _in_127(host: str) -> bool:
    return host.startswith("127.") and host.replace(".", "").isdigit()  # no 127.example.com


def bind(addresses: Sequence[str]) -> list[socket.socket]:
    """Return listening sockets. Raises AddressInUseError, ConfigError, UnavailableError and leaves none open then."""
    sockets: list[socket.socket] = []
    try:
        for text in addresses:
            sockets.append(_bind(*parse_address(text)))
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def _bind(host: str, port: int) -> socket.socket:
    # For text Python imports the codec of international names, which no address needs: 3 ms before the spawn.
    is_address = host.isascii() and (":" in host or host.replace(".", "").isdigit())
    name = host.encode() if is_address else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, ValueError) as error:  # ValueError: a name that no DNS can hold (UnicodeError), a zero byte
        why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise ConfigError(f"cannot listen on {host}: {why}", "use an address of this machine") from error
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # connections in TIME_WAIT do not block a restart
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            from edge.linux.procfs import port_owner

            holder = port_owner(port)
            look = "" if holder else f"`sudo ss -ltnp 'sport = :{port}'` names it; "
            hint = f"{look}end it, or choose another address: --listen {host}:{port + 1}"
            raise AddressInUseError(f"{host}:{port} is taken by {holder or 'another program'}", hint) from error
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}", None) from error
    return listener


def url(listener: socket.socket, tls: bool) -> str:
    """Return `http://127.0.0.1:8080`, `https://…` with a certificate, or `unix:PATH`."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"


def listener_pid(path: Path, timeout_s: float = 1.0) -> int:
    """Return the process that listens on a unix socket; 0 if unknown (another pid namespace, or no connection).

    SO_PEERCRED of unix(7) names the process that called listen(2).
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(str(path))
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # struct ucred: pid, uid, gid
        except OSError:
            return 0
    return int.from_bytes(raw[:4], sys.byteorder)
