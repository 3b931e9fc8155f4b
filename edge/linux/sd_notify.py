"""Send sd_notify(3) messages. Standard library only: the protocol is six lines."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

from edge.linux.tree import parse_count

MOST_STATUS_CHARACTERS = 300


class Notifier:
    """A connection to the service manager. Without one each call does nothing; none raises."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s  # WatchdogSec= of the unit; None without a watchdog
        self._socket: socket.socket | None = None
        self._due: dict[
            str, str
        ] = {}  # lines by variable that the service manager did not take; the next message has them
        if address:
            with contextlib.suppress(OSError):
                self._socket = _connect(address)

    @classmethod
    def take(cls, env: MutableMapping[str, str]) -> Notifier:
        """Read and unset NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, so that children do not inherit them."""
        address, usec, pid = (env.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
        pause_us = parse_count(usec) if pid in ("", str(os.getpid())) else None
        return cls(address or None, pause_us / 1e6 if pause_us else None)

    @property
    def heard(self) -> bool:
        """Return whether there is a service manager."""
        return self._socket is not None

    def ready(self, status: str) -> None:
        self._send("READY=1", _status(status))

    def status(self, text: str, *, more_s: float | None = None) -> None:
        """Set the status line. `more_s`: extend the running start or stop timeout to so many seconds from now."""
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
        self._due |= {line.partition("=")[0]: line for line in lines}
        try:
            data = "\n".join(self._due.values()).encode(
                "utf-8", "replace"
            )  # file names may hold bytes that are no UTF-8
            self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self._due.clear()
        except OSError:  # a full socket: without a later READY=1 the service would be ended as one that does not start
            self._due.pop("WATCHDOG", None)  # it states that all is well now


def _connect(address: str) -> socket.socket | None:
    """Connect to `/path` or `@abstract`. systemd uses vsock only for virtual machines as a whole."""
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
    """Join the text to one line: a line break would begin another variable."""
    return "STATUS=" + " ".join(text.split())[:MOST_STATUS_CHARACTERS]


def _extend(more_s: float | None) -> tuple[str, ...]:
    return () if more_s is None else (f"EXTEND_TIMEOUT_USEC={int(more_s * 1e6)}",)
