"""Read lines of a pipe into a callback on the event loop. A line without an end is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import IO

LINE_BYTES_MAX = 64 * 1024


class Lines(asyncio.Protocol):
    """A protocol that calls `on_line` for each line. `ended` is set when every writer has closed the pipe."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.ended = asyncio.Event()
        self._on_line = on_line
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._on_line(_text(line))
        if len(self._rest) > LINE_BYTES_MAX:
            self._on_line(_text(self._rest))
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:
        if self._rest:
            self._on_line(_text(self._rest))
            self._rest = b""
        self.ended.set()


def _text(line: bytes) -> str:
    return line[:LINE_BYTES_MAX].decode(errors="replace").rstrip()


async def read_lines(pipe: IO[bytes], on_line: Callable[[str], None]) -> tuple[asyncio.ReadTransport, Lines]:
    """Start reading a pipe. Close the transport at the end."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_read_pipe(lambda: Lines(on_line), pipe)
    return transport, protocol
