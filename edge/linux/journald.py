"""Send entries to journald by its native protocol: one datagram per entry, with priority and fields."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from edge.linux.best_effort import BestEffortWriter

SOCKET = Path("/run/systemd/journal/socket")
# Levels of syslog(3).
ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6
MOST_ENTRY_BYTES = 64 * 1024  # below net.core.wmem_default (208 KiB), the limit of one datagram


def goes_to_journal(env: Mapping[str, str], descriptor: int) -> bool:
    """Return whether a descriptor is the stream named by JOURNAL_STREAM (device:inode, systemd.exec(5))."""
    device, _, inode = env.get("JOURNAL_STREAM", "").partition(":")
    try:
        stat = os.fstat(descriptor)
    except OSError:
        return False
    return (device, inode) == (str(stat.st_dev), str(stat.st_ino))


class Journal:
    """A connection to journald; without its socket, `<N>text` lines go to `out`, as in sd-daemon(3).

    `shown` is applied to all text: journalctl prints an entry with a control character as `[37B blob data]`.
    """

    def __init__(self, path: Path = SOCKET, out: TextIO | None = None, shown: Callable[[str], str] = str) -> None:
        self._out = BestEffortWriter(out or sys.stdout)
        self._path = path
        self._shown = shown
        self.dropped = 0  # entries that journald did not take in time
        self._noted = 0
        self._socket = self._connected()

    def _connected(self) -> socket.socket | None:
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sender.connect(str(self._path))
            sender.setblocking(False)
        except OSError:
            sender.close()
            return None
        return sender

    def send(self, message: str, priority: int, **fields: str | None) -> None:
        """Send one entry without waiting; errors are ignored. The caller names fields EDGELLM_….

        Entries that journald does not take are counted; a note on them follows the next one that it takes.
        """
        message = self._shown(message)
        data = entry(message, priority, {name: value and self._shown(value) for name, value in fields.items()})
        if self._taken(data):
            return
        with contextlib.suppress(OSError, ValueError):  # closed, or an encoding that lacks a character
            self._out.write("".join(f"<{priority}>{line}\n" for line in message.splitlines() or [""]))

    def _taken(self, data: bytes) -> bool:
        """Send a datagram; return False without a journald. One that was started with a new socket is found again."""
        sender = self._socket
        for _ in range(2):
            if sender is None:
                return False
            try:
                sender.send(data, socket.MSG_NOSIGNAL)
                self._note_dropped(sender)
                return True
            except BlockingIOError:
                self.dropped += 1  # stdout is journald's as well
                return True
            except ConnectionError:
                former, sender = sender, self._connected()
                if sender is not None:
                    former.close()
                    self._socket = sender
            except OSError:
                return False
        return False

    def _note_dropped(self, sender: socket.socket) -> None:
        if self.dropped == self._noted:
            return
        text = f"{self.dropped - self._noted} entries are missing: journald did not take them in time"
        with contextlib.suppress(OSError):
            sender.send(entry(text, WARNING, {}), socket.MSG_NOSIGNAL)
            self._noted = self.dropped

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()


def entry(message: str, priority: int, fields: Mapping[str, str | None]) -> bytes:
    """Encode one datagram; a value with a line break carries its length (systemd, JOURNAL_NATIVE_PROTOCOL)."""
    every = {"MESSAGE": message, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "edgellm", **fields}
    return b"".join(_field(name, value) for name, value in every.items() if value is not None)


def _field(name: str, value: str) -> bytes:
    # Not cut within a character: journalctl shows text that is no UTF-8 as blob data.
    data = value.encode("utf-8", "replace")[: MOST_ENTRY_BYTES // 4].decode(errors="ignore").encode()
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"


class Handler(logging.Handler):
    """Sends Python's log records as journal entries."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record with its level as priority."""
        try:
            text = self.format(record)
        except Exception:  # a bad format string must not stop the service
            self.handleError(record)
            return
        priority = ERROR if record.levelno >= logging.ERROR else WARNING if record.levelno >= logging.WARNING else INFO
        self._journal.send(text, priority, EDGELLM_LOGGER=record.name)
