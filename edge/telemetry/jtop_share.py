"""Share the lines of the jtop reader on a unix socket: the program of edgellm-jtop.service.

    python -m edge.telemetry.jtop_share --listen /run/edgellm-jtop/share.sock [--python PYTHON]

Members of group jtop can change clocks and fans and exchange pickles with a root service, so this is the only process
of edgellm in that group. A client gets the JSON lines of jtop_reader.py, the latest first, and may request an interval
("interval S"); the shortest requested one is used. Ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path

from edge.linux.sockets import AT_ONCE, BACKLOG
from edge.telemetry.jtop import JtopSource
from edge.telemetry.jtop_line import IDLE_INTERVAL_S, WATCHED_INTERVAL_S

_MOST_BACKLOG_BYTES = 1 << 20  # a client that does not read is disconnected, or its backlog would grow without end


# Of one user. A member of the group edgellm must not take the descriptors with connections that it keeps.
_MOST_CONNECTIONS = 8


class JtopShare:
    """A server of jtop lines."""

    def __init__(self, python: Path | None = None) -> None:
        self.source = JtopSource(python=python, on_line=self._broadcast)
        self._last = b""
        self._intervals: dict[asyncio.StreamWriter, float] = {}
        self._users: Counter[int] = Counter()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled."""
        # asyncio tries so many accepts in one turn of its loop, and logs each that meets EMFILE.
        server = await asyncio.start_unix_server(self._client, sock=listener, backlog=AT_ONCE)
        listener.listen(BACKLOG)
        try:
            await self.source.run()
        finally:
            server.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        user = _uid(writer)
        if self._users[user] >= _MOST_CONNECTIONS and user not in (0, os.getuid()):
            writer.close()
            return
        self._users[user] += 1
        self._intervals[writer] = IDLE_INTERVAL_S
        try:
            # At once: in the idle interval the next line may be seconds away.
            writer.write(self._last)
            while line := await reader.readline():
                words = line.split()
                if words[:1] == [b"interval"] and words[1:]:
                    often = words[1] == b"%g" % WATCHED_INTERVAL_S
                    self._intervals[writer] = WATCHED_INTERVAL_S if often else IDLE_INTERVAL_S
                    self._apply_interval()
        except (OSError, ValueError):
            pass  # the client left, or sent an endless line
        finally:
            del self._intervals[writer]
            self._users[user] -= 1
            self._apply_interval()
            writer.close()

    def _apply_interval(self) -> None:
        self.source.set_interval(min(self._intervals.values(), default=IDLE_INTERVAL_S))

    def _broadcast(self, line: bytes) -> None:
        self._last = line
        for writer in self._intervals:
            if writer.transport.get_write_buffer_size() > _MOST_BACKLOG_BYTES:
                writer.transport.abort()
            else:
                writer.write(line)


def _uid(writer: asyncio.StreamWriter) -> int:
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # struct ucred
    return int.from_bytes(raw[4:8], sys.byteorder)


def bind(path: Path) -> socket.socket:
    """Bind a socket that user and group may use."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    # By umask: between bind and a chmod others could connect.
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    return listener


async def _main(listener: socket.socket, python: Path | None) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await JtopShare(python).serve(listener)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="shares jtop's values on a unix socket")
    parser.add_argument("--listen", type=Path, required=True, metavar="SOCKET")
    parser.add_argument("--python", type=Path, help="the interpreter that has jetson-stats (default: the service's)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    asyncio.run(_main(bind(options.listen), options.python))
