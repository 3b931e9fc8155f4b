"""A fake llama-server on a unix socket, in the test's own loop: every byte and every pause is the test's choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Received:
    """One request as it came in."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    connection: int = 0

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass
class Line:
    """One connection to the fake, for scripts: read the request, write the answer, cut the line."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, value: object, status: str = "200 OK", extra: str = "") -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8\r\n"
        await self.write(f"{head}{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def stream(self, extra: str = "") -> None:
        head = "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
        await self.write(f"{head}{extra}Transfer-Encoding: chunked\r\n\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def until_gone(self) -> None:
        """Waits until the gateway closes this connection."""
        while await self.reader.read(65536):
            pass
        self.gone.set()

    def cut(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Line, Received], Awaitable[None]]


async def answer_ok(line: Line, request: Received) -> None:
    await line.json({"ok": True, "body_bytes": len(request.body)})


class FakeEngine:
    """`script` handles each request; `read_body` False leaves the body on the line. Records what it saw."""

    def __init__(self, path: Path, script: Script = answer_ok, *, read_body: bool = True) -> None:
        self.path = path
        self.script = script
        self.read_body = read_body
        self.requests: list[Received] = []
        self.lines: list[Line] = []
        self.open = 0
        self.idle_s: float | None = None  # closes a connection that is idle for so long
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accept, str(self.path), limit=2**20)

    async def stop(self) -> None:
        """Dies: the socket refuses, every connection is cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.path.unlink(missing_ok=True)
        for line in self.lines:
            line.cut()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer, len(self.lines))
        self.lines.append(line)
        self.open += 1
        try:
            while (request := await self._read(line)) is not None:
                self.requests.append(request)
                await self.script(line, request)
                if request.header("connection") == "close":
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            line.gone.set()
            writer.close()

    async def _read(self, line: Line) -> Received | None:
        try:
            head = await asyncio.wait_for(line.reader.readuntil(b"\r\n\r\n"), self.idle_s)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, TimeoutError):
            return None
        first, *rest = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = [(key, value.strip()) for key, _, value in (row.partition(":") for row in rest if row)]
        request = Received(method, target, headers, connection=line.number)
        if self.read_body:
            request.body = await self._body(line.reader, request)
        return request

    async def _body(self, reader: asyncio.StreamReader, request: Received) -> bytes:
        if (request.header("transfer-encoding") or "").lower() == "chunked":
            parts = []
            while size := int(await reader.readuntil(b"\r\n"), 16):
                parts.append(await reader.readexactly(size))
                await reader.readexactly(2)
            await reader.readexactly(2)
            return b"".join(parts)
        return await reader.readexactly(int(request.header("content-length") or 0))
