"""sd_notify(3), written out: six lines of protocol are no reason for a dependency. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

MOST_STATUS_CHARACTERS = 300


class Notifier:
    """Tells the service manager how we are. Without one, every call does nothing; none ever raises."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s  # how long it waits for a sign of life; None: it does not look
        self._socket: socket.socket | None = None
        if address:
            with contextlib.suppress(OSError):
                self._socket = _connect(address)

    @classmethod
    def take(cls, env: MutableMapping[str, str]) -> Notifier:
        """From NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, taken once: no child shall believe them."""
        address, usec, pid = (env.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
        ours = pid in ("", str(os.getpid())) and usec.isdigit() and int(usec) > 0
        return cls(address or None, int(usec) / 1e6 if ours else None)

    @property
    def heard(self) -> bool:
        """Somebody listens."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        self._send("READY=1", _status(status))

    def status(self, text: str, *, more_s: float | None = None) -> None:
        """`more_s`: from now on, so much time for what is under way (a start or a stop that moves)."""
        self._send(_status(text), *(_extend(more_s)))

    def stopping(self, status: str, *, more_s: float | None = None) -> None:
        self._send("STOPPING=1", _status(status), *(_extend(more_s)))

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError):  # a full or vanished socket costs a message, not the service
            self._socket.send("\n".join(lines).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _connect(address: str) -> socket.socket | None:
    """`/path` or `@abstract`; systemd offers vsock to virtual machines only, and that is not us."""
    if address[0] not in "/@":
        return None
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sender.connect("\0" + address[1:] if address[0] == "@" else address)
    except OSError:
        sender.close()
        raise
    return sender


def _status(text: str) -> str:
    """One line: a line break would begin another message."""
    return "STATUS=" + " ".join(text.split())[:MOST_STATUS_CHARACTERS]


def _extend(more_s: float | None) -> tuple[str, ...]:
    return () if more_s is None else (f"EXTEND_TIMEOUT_USEC={int(more_s * 1e6)}",)
