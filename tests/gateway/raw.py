"""A client that writes bytes: for what a well-behaved HTTP library will not do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

LIMIT_S = 20.0  # far above anything measured; a test that needs it has failed


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @staticmethod
    async def connect(port: int, host: str = "127.0.0.1") -> Client:
        return Client(*await asyncio.open_connection(host, port, limit=2**22))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(self, method: str, target: str, body: bytes = b"", *headers: str) -> None:
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        await self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    async def head(self) -> Answer:
        block = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        first, *rest = block.decode("latin-1").split("\r\n")
        pairs = [(key, value.strip()) for key, _, value in (row.partition(":") for row in rest if row)]
        return Answer(int(first.split(" ")[1]), pairs, b"")

    async def answer(self, *, bodiless: bool = False) -> Answer:
        answer = await self.head()
        if bodiless:
            return answer
        if answer.header("transfer-encoding") == "chunked":
            answer.body = b"".join(await self.chunks())
        else:
            size = int(answer.header("content-length") or 0)
            answer.body = await asyncio.wait_for(self.reader.readexactly(size), LIMIT_S)
        return answer

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; empty at its end. Raises IncompleteReadError at an abnormal end."""
        size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), LIMIT_S), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size), LIMIT_S)
        await self.reader.readexactly(2)
        return data

    async def chunks(self) -> list[bytes]:
        found = []
        while data := await self.chunk():
            found.append(data)
        return found

    async def rest(self) -> bytes:
        """All that comes until the other side closes."""
        return await asyncio.wait_for(self.reader.read(), LIMIT_S)

    def reset(self) -> None:
        """Leaves with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def leave(self) -> None:
        self.writer.close()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def half_close(self) -> None:
        self.writer.write_eof()


async def once(port: int, data: bytes) -> Answer:
    """One request in raw bytes, one answer."""
    client = await Client.connect(port)
    try:
        await client.send(data)
        return await client.answer(bodiless=data.startswith(b"HEAD"))
    finally:
        await client.close()


async def until(true: Callable[[], object]) -> None:
    """Waits for something that has no event of its own. Fails after LIMIT_S."""
    for _ in range(int(LIMIT_S / 0.005)):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")
