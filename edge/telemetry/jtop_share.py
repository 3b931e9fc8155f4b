"""edgellm-jtop.service: the only process of edgellm in group jtop (as good as root); gives jtop's lines to others.

    python -m edge.telemetry.jtop_share --listen /run/edgellm-jtop/share.sock [--python PYTHON]

Who connects gets the reader's JSON lines (jtop_reader.py), starting with the latest, and may ask for a pace
("interval S"): the fastest wish counts. Ends on SIGTERM.
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
from pathlib import Path

from edge.telemetry.jtop import JtopSource
from edge.telemetry.jtop_line import CALM_S, WATCHED_S

_MOST_BACKLOG_BYTES = 1 << 20


class Share:
    def __init__(self, python: Path | None = None) -> None:
        self.source = JtopSource(python=python, on_line=self._spread)
        self._last = b""
        self._wishes: dict[asyncio.StreamWriter, float] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled."""
        server = await asyncio.start_unix_server(self._client, sock=listener)
        try:
            await self.source.run()
        finally:
            server.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._wishes[writer] = CALM_S
        try:
            writer.write(self._last)
            while line := await reader.readline():
                words = line.split()
                if words[:1] == [b"interval"] and words[1:]:
                    self._wishes[writer] = CALM_S if words[1] != b"%g" % WATCHED_S else WATCHED_S
                    self._pace()
        except (OSError, ValueError):
            pass  # it left, or sent a line without end
        finally:
            del self._wishes[writer]
            self._pace()
            writer.close()

    def _pace(self) -> None:
        self.source.pace(min(self._wishes.values(), default=CALM_S))

    def _spread(self, line: bytes) -> None:
        self._last = line
        for writer in self._wishes:
            if writer.transport.get_write_buffer_size() > _MOST_BACKLOG_BYTES:
                writer.transport.abort()
            else:
                writer.write(line)


def bind(path: Path) -> socket.socket:
    """A socket for our user and group."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
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
        await Share(python).serve(listener)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="shares jtop's values on a unix socket")
    parser.add_argument("--listen", type=Path, required=True, metavar="SOCKET")
    parser.add_argument("--python", type=Path, help="the interpreter that has jetson-stats (default: the service's)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    asyncio.run(_main(bind(options.listen), options.python))
