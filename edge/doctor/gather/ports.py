"""Who listens on our addresses, from /proc/net/tcp and the descriptors in /proc. No packet is sent."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

from edge.board.tree import Tree
from edge.doctor.facts import Port

_LISTEN = "0A"


def read(tree: Tree, listen: tuple[str, ...], lock: Path, service_active: bool) -> tuple[Port, ...]:
    """`lock` is ours: whoever holds it is our own process.

    For an active service systemd (1) holds the port, or a user whose descriptors we may not see (0).
    """
    ports = []
    taken = list(listeners(tree))
    for address in listen:
        host, _, number = address.rpartition(":")
        inode = next((inode for ip, port, inode in taken if str(port) == number and _overlap(host, ip)), None)
        if inode is None:
            ports.append(Port(address))
            continue
        pid, name = _owner(tree, inode)
        ours = pid in holders(tree, lock) or (pid in (0, 1) and service_active)
        ports.append(Port(address, pid, name, ours))
    return tuple(ports)


def listeners(tree: Tree) -> Iterator[tuple[str, int, str]]:
    """(address, port, inode) of every listening TCP socket."""
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in list(tree.lines(file))[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTEN:
                address, _, port = words[1].partition(":")
                yield _address(address), int(port, 16), words[9]


def holders(tree: Tree, lock: Path) -> set[int]:
    """Processes with a lock on that file (/proc/locks: kind, mode, access, pid, device:inode)."""
    try:
        inode = str(lock.stat().st_ino)
    except OSError:
        return set()
    words = [line.split() for line in tree.lines("/proc/locks")]
    return {int(w[4]) for w in words if len(w) > 5 and w[5].endswith(f":{inode}") and w[4].isdecimal()}


def _address(text: str) -> str:
    """The kernel prints words of four bytes in the machine's order."""
    raw = bytes.fromhex(text)
    flipped = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    address = ipaddress.ip_address(flipped)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _overlap(host: str, ip: str) -> bool:
    """Whether binding `host` collides with a listener on `ip`. `::` takes IPv4 too, as Linux does by default."""
    plain = host.strip("[]")
    wild = ("0.0.0.0", "::", "", "*")
    return plain in wild or ip in wild or plain == ip or (plain == "localhost" and ip in ("127.0.0.1", "::1"))


def _owner(tree: Tree, inode: str) -> tuple[int, str | None]:
    """(0, None) when the owner is somebody whose descriptors we may not see."""
    wanted = f"socket:[{inode}]"
    for pid in tree.children("/proc"):
        if not re.fullmatch(r"\d+", pid):
            continue
        folder = tree.path(f"/proc/{pid}/fd")
        try:
            if any(str(link.readlink()) == wanted for link in folder.iterdir()):
                return int(pid), tree.word(f"/proc/{pid}/comm")
        except OSError:
            continue
    return 0, None
