"""Ask rpc-servers for the memory of their devices by llama.cpp's RPC protocol, and find the interface to an address.

A message is one byte of command, eight of length, then the data; an answer is eight of length, then the data, all
little-endian (ggml/src/ggml-rpc/ggml-rpc.cpp, 0c1e57098).
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from pathlib import Path

from msgspec import Struct

from edge.errors import ConfigError, RemoteMissingError

PROTOCOL = 7  # RPC_PROTO_MAJOR_VERSION of ggml-rpc.h: client and server must have the same
_GET_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15  # enum rpc_cmd
_CAPS_BYTES = 24  # RPC_CONN_CAPS_SIZE of transport.h; zeros: TCP, no RDMA
_DEVICES_MOST = 64
ANSWER_S = 3.0  # a CUDA server that is awake answers in milliseconds, on any link that serves tokens


class DeviceMemory(Struct, frozen=True):
    """The memory of one device of an rpc-server. A CPU answers that all of it is free."""

    free_bytes: int
    total_bytes: int


def ask_memory(host: str, port: int, timeout_s: float = ANSWER_S) -> tuple[DeviceMemory, ...]:
    """Return the memory of each device. Blocking.

    Raises RemoteMissingError, `busy` where the kernel accepts the connection and the server does not answer: it serves
    one client at a time. Raises ConfigError for another protocol.
    """
    address, end_s = f"{host}:{port}", time.monotonic() + 2 * timeout_s
    with _connected(host, port, timeout_s) as server:
        try:
            hello = _call(server, end_s, _HELLO, bytes(_CAPS_BYTES), 4 + _CAPS_BYTES)
            if hello[0] != PROTOCOL:
                theirs = ".".join(map(str, hello[:3]))
                hint = "build the engines of both boards with the same edgellm: `edgellm build --rpc`"
                raise ConfigError(f"the rpc-server at {address} speaks protocol {theirs}, not {PROTOCOL}.x", hint)
            (count,) = struct.unpack("<I", _call(server, end_s, _DEVICE_COUNT, b"", 4))
            rows = [
                struct.unpack("<QQ", _call(server, end_s, _GET_DEVICE_MEMORY, struct.pack("<I", index), 16))
                for index in range(min(count, _DEVICES_MOST))
            ]
        except TimeoutError as error:
            hint = "an rpc-server serves one engine at a time: end the other one, or give it another server"
            why = f"the rpc-server at {address} accepts, and does not answer"
            raise RemoteMissingError(why, hint, busy=True) from error
        except (OSError, EOFError, struct.error) as error:
            hint = "is it an rpc-server of the same llama.cpp? `edgellm rpc serve` starts one"
            raise RemoteMissingError(f"{address} does not answer as an rpc-server: {error}", hint) from error
    return tuple(DeviceMemory(*row) for row in rows)


def reachable(endpoint: str) -> bool:
    """Return whether a connection to `host:port` is accepted. Blocking."""
    host, _, port = endpoint.rpartition(":")
    try:
        _connected(host, int(port), ANSWER_S).close()
    except RemoteMissingError:
        return False
    return True


_ESTABLISHED, _CLOSE_WAIT = "01", "08"  # enum of include/net/tcp_states.h


def connected(pid: int | None, endpoint: str) -> bool:
    """Return whether the network namespace of a process has an open connection to `host:port`; True where unknown.

    `pid` None is this process.

    A server that ends closes its connections, which the engine notices only when it uses them.
    """
    host, _, port = endpoint.rpartition(":")
    rows = _connections(pid)
    wanted = _as_in_proc(host, int(port))
    return rows is None or any(row[2] == wanted and row[3] == _ESTABLISHED for row in rows)


class Clients(Struct, frozen=True):
    """The peers of a listening address: `served` have been accepted; `waiting`, one a connection, are in the queue.

    `open`: those of `waiting` that have not closed it. Connections that are closed in the queue stay there.
    """

    served: frozenset[str]
    waiting: tuple[str, ...]
    open: frozenset[str]

    @property
    def returned(self) -> frozenset[str]:
        """Return peers that ask again behind a connection of their own; one closed one may be a look at the port."""
        again = {peer for peer in self.waiting if self.waiting.count(peer) > 1}
        return self.served & (again | self.open)


def clients(pid: int, host: str, port: int) -> Clients:
    """Return the peers of a server in the network namespace of its process, as text that names an address."""
    own = _as_in_proc(host, port)
    rows = [(row[2].partition(":")[0], row[3], row[9]) for row in _connections(pid) or () if row[1] == own]
    # A connection has no inode before accept(2) makes a file of it.
    served = frozenset(peer for peer, state, inode in rows if inode != "0" and state == _ESTABLISHED)
    waiting = [(peer, state) for peer, state, inode in rows if inode == "0" and state in (_ESTABLISHED, _CLOSE_WAIT)]
    still_open = frozenset(peer for peer, state in waiting if state == _ESTABLISHED)
    return Clients(served, tuple(peer for peer, _ in waiting), still_open)


def _as_in_proc(host: str, port: int) -> str:
    """Return an address as proc_net_tcp(5) has it: a number of the host's byte order, and the port, in hexadecimal."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def _connections(pid: int | None) -> list[list[str]] | None:
    try:
        lines = Path(f"/proc/{'self' if pid is None else pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return None
    return [fields for line in lines if len(fields := line.split()) > 9]


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        hint = "start `edgellm rpc serve` there, and check address, cable and firewall"
        reason = error.strerror or "no answer"
        raise RemoteMissingError(f"no rpc-server at {host}:{port}: {reason}", hint) from error


def _call(server: socket.socket, end_s: float, command: int, data: bytes, size: int) -> bytes:
    """Send one command and return its answer. Raises EOFError where it is not `size` bytes long."""
    server.sendall(struct.pack("<BQ", command, len(data)) + data)
    (length,) = struct.unpack("<Q", _exactly(server, end_s, 8))
    if length != size:
        raise EOFError(f"{length} bytes where {size} are due")
    return _exactly(server, end_s, size)


def _exactly(server: socket.socket, end_s: float, size: int) -> bytes:
    """Read `size` bytes until `end_s`: a server that sends one byte now and then meets no limit of a single recv."""
    data = b""
    while len(data) < size:
        if time.monotonic() > end_s:
            raise TimeoutError
        chunk = server.recv(size - len(data))
        if not chunk:
            raise EOFError("it closed the connection")
        data += chunk
    return data


def own_addresses(interface: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of one network interface; empty where it does not exist."""
    import psutil  # not before the spawn of a machine without [[device]]

    rows = psutil.net_if_addrs().get(interface, ())
    return tuple(row.address for row in rows if row.family == socket.AF_INET)


def address_towards(host: str) -> str | None:
    """Return the local address from which the kernel would reach `host`; None without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # connect(2) of a datagram socket only chooses the route
        except OSError:
            return None
        return str(probe.getsockname()[0])
