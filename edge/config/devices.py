"""Other boards that hold layers of a model, from `[[device]]` tables, and the addresses that RPC may use. Pure.

llama.cpp's RPC protocol has neither authentication nor encryption: any program that reaches an rpc-server can use its
memory.
"""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address, ip_network
from typing import Annotated, Any, Literal

from msgspec import Struct

from edge.config.fields import Place, fields_of, key, read_table, tables
from edge.errors import ConfigError
from edge.linux.sockets import split_host_port

RPC_PORT = 50052  # rpc-server's own default (tools/rpc/rpc-server.cpp)
# RFC 1918, link-local (RFC 3927), and the shared range of RFC 6598, which networks over WireGuard (Tailscale) use.
_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10")))
_NO_SECRET = "RPC has no authentication"
_TUNNEL = "use loopback with a tunnel (`ssh -N -L 50052:127.0.0.1:50052 BOARD`), or a private interface that you name"


class DeviceConfig(Struct, frozen=True):
    """One `[[device]]`: an rpc-server that may hold layers. `memory` 0: as the server answers."""

    rpc: Annotated[str, key("host:port of an rpc-server (`edgellm rpc serve`): loopback, or on `interface`")] = ""
    interface: Annotated[str, key("private network interface that leads to it; not needed for loopback")] = ""
    memory: Annotated[
        int, key("memory of it that layers may take; 0 asks the server, which knows it of GPUs only", ge=0, kind="size")
    ] = 0
    absent: Annotated[
        Literal["wait", "without"],
        key("what to do when it does not answer: wait for it, or serve a smaller plan without it"),
    ] = "wait"
    origin: str = ""


DEVICE_KEYS = fields_of(DeviceConfig)


class RpcAddress(Struct, frozen=True):
    """The address of an rpc-server. `loopback`: this machine's, or the near end of a tunnel."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def rpc_address(text: str, interface: str = "") -> RpcAddress:
    """Parse and judge an address: loopback, or a private one whose interface is named. Raises ConfigError.

    llama.cpp's RPC takes an IPv4 address and cuts the text at its first colon (ggml-rpc.cpp, parse_endpoint), so there
    is no IPv6; a host name could lead elsewhere tomorrow.
    """
    host, port = split_host_port(text.strip()) or ("", None)
    if not host or not port:
        raise ConfigError(f"not the address of an rpc-server: {text[:100]!r}", f"write it like 10.0.0.2:{RPC_PORT}")
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        hint = "a name can lead to another machine tomorrow: write its IPv4 address"
        raise ConfigError(f"rpc takes no host name: {host!r}", hint) from None
    if not isinstance(address, IPv4Address):
        raise ConfigError(f"llama.cpp's RPC has no IPv6: {text!r}", "write an IPv4 address, or use a tunnel")
    found = RpcAddress(str(address), port)
    if found.loopback:
        return found
    if address.is_unspecified:
        raise ConfigError(f"{_NO_SECRET}: {found} would be open on every interface", _TUNNEL)
    if not any(address in network for network in _PRIVATE):
        raise ConfigError(f"{_NO_SECRET}: {host} is no private address", _TUNNEL)
    if not interface:
        hint = 'name it: interface = "eth1", or --interface eth1'
        raise ConfigError(f"{_NO_SECRET}: {found} needs the name of its private interface", hint)
    return found


def read_devices(rows: object, source: str, place: Place) -> tuple[DeviceConfig, ...]:
    """Read the `[[device]]` tables. Raises ConfigError naming file and key."""
    numbered = enumerate(tables(rows, "device", source), 1)
    devices = tuple(_device(row, f"{source}: device {number}", place) for number, row in numbered)
    seen: set[str] = set()
    for device in devices:
        if device.rpc in seen:
            raise ConfigError(f"{device.origin}: {device.rpc} stands in two [[device]] tables", "remove one")
        seen.add(device.rpc)
    return devices


def _device(row: dict[str, Any], source: str, place: Place) -> DeviceConfig:
    values = read_table(DEVICE_KEYS, row, source, place)
    if not values.get("rpc"):
        raise ConfigError(f"{source}: rpc is missing", f'write rpc = "10.0.0.2:{RPC_PORT}"')
    try:
        address = rpc_address(values["rpc"], values.get("interface", ""))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}", error.hint) from None
    return DeviceConfig(**{**values, "rpc": str(address)}, origin=source)
