"""Find the owners of the configured addresses in /proc, without sending a packet."""

from __future__ import annotations

from pathlib import Path

from edge.doctor.facts import Port
from edge.linux.procfs import PROC, listening_sockets, lock_holders, socket_owner


def read_ports(listen: tuple[str, ...], lock: Path, service_active: bool, proc: Path = PROC) -> tuple[Port, ...]:
    """Return the owner of each address. The process that holds `lock` is edgellm itself.

    For an active service systemd (pid 1) holds the port, or a process that /proc hides from this user (pid 0).
    """
    ports = []
    taken, holders = list(listening_sockets(proc)), lock_holders(lock, proc)
    for address in listen:
        host, _, number = address.rpartition(":")
        inode = next((s.inode for s in taken if str(s.port) == number and _overlap(host, s.address)), None)
        if inode is None:
            ports.append(Port(address))
            continue
        owner = socket_owner({inode}, proc)
        # /proc/PID/fd of other users is closed: a socket without a visible owner is not free.
        pid, name = (owner.pid, owner.name) if owner else (0, None)
        ports.append(Port(address, pid, name, pid in holders or (pid in (0, 1) and service_active)))
    return tuple(ports)


def _overlap(host: str, ip: str) -> bool:
    """Return whether binding `host` collides with a listener on `ip`. `::` takes IPv4 too, the default of Linux."""
    plain = host.strip("[]")
    wild = ("0.0.0.0", "::", "", "*")
    return plain in wild or ip in wild or plain == ip or (plain == "localhost" and ip in ("127.0.0.1", "::1"))
