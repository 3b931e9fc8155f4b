"""Speak HTTP/1.1 with an engine over one connection: aiohttp's client protocol and parser, without its session.

A session does much for any server (redirects, cookies, proxies, traces), which takes 0.2 ms of each first chunk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable

from aiohttp.client_exceptions import ClientConnectionError, ClientError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError, RawResponseMessage, StreamWriter
from aiohttp.streams import StreamReader

from edge.supervisor.upstream import Endpoint
from edge.units import KIB, MIB

READ_BYTES = 64 * KIB  # buffered for a client that reads slowly
HEADER_BYTES = 64 * KIB
# Of a JSON document of an engine that is read whole. /props holds the chat template of the model's file, the largest
# known ones 300 KiB; a file may hold one of gigabytes.
DOCUMENT_BYTES = 4 * MIB
# Of any answer that is read whole before it is passed on: 10 000 embeddings of 4096 numbers take 400 MB of JSON.
ANSWER_BYTES = 64 * MIB
_CONNECT_S = 10.0

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # of these no Content-Length means no body

Pairs = list[tuple[str, str]]
Payload = bytes | AsyncIterator[bytes] | None


def in_chunks(pairs: Pairs, body_bytes: int | None) -> bool:
    """Return whether a body is sent in chunks: of unknown length, and the client named none. Head and body obey it."""
    return body_bytes is None and not any(name.lower() == "content-length" for name, _ in pairs)


def request_head(method: str, target: str, pairs: Pairs, body_bytes: int | None, *, keep: bool) -> bytes:
    """Return a request's first line and headers, with those that frame its body.

    `body_bytes` None: sent in chunks, unless the client named its length. Raises ValueError for a header of two lines.
    """
    names = {name.lower() for name, _ in pairs}
    lines = [f"{method} {target.partition('#')[0]} HTTP/1.1", *(f"{name}: {value}" for name, value in pairs)]
    if "host" not in names:
        lines.append("Host: engine")
    if not keep:
        lines.append("Connection: close")
    if in_chunks(pairs, body_bytes):
        lines.append("Transfer-Encoding: chunked")
    elif "content-length" not in names and (body_bytes or method not in _WITHOUT_BODY):
        lines.append(f"Content-Length: {body_bytes}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise ValueError("a line break in a header")
    # As aiohttp's server decodes them: the engine gets the client's bytes.
    return text.encode("utf-8", "surrogateescape") + b"\r\n\r\n"


class ConnectFailed(ClientConnectionError):
    """No process accepted the connection."""


class BadAnswer(ClientError):
    """The head of an answer is no HTTP, or larger than HEADER_BYTES; or a document is larger than its reader takes."""


# What aiohttp's parser lets through and its server refuses to send; a tab may stand in a header.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FREE_BYTES = 1 * MIB  # of an answer that is read whole, before it is counted
_MOST_INFORMATIONAL = 100  # answers 1xx before the one that counts


def _unfit(message: RawResponseMessage) -> str | None:
    """Return why the head of an answer cannot be passed on, None for a usual one."""
    if message.code < 200:  # 101 was asked by nobody: Upgrade is not sent to engines
        return f"status {message.code}"
    if [value.strip().lower() for value in message.headers.getall("Transfer-Encoding", ["chunked"])] != ["chunked"]:
        return "a Transfer-Encoding other than chunked"  # the client would get the packed body, and no word of it
    if _CONTROL.search(message.reason or "") or any(_CONTROL.search(value) for value in message.headers.values()):
        return "a control character in its head"
    return None


class EngineAnswer:
    """The head of an engine's answer, and its body as it arrives.

    Reads raise aiohttp.ClientError if the body is malformed or its connection ends too early.
    """

    def __init__(self, message: RawResponseMessage, content: StreamReader) -> None:
        """Raises BadAnswer for a head that cannot be passed on."""
        if (why := _unfit(message)) is not None:
            raise BadAnswer(why)
        self.status = message.code
        self.reason = message.reason
        self.headers = message.headers
        self.content = content
        self.content_type = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        length = message.headers.get("Content-Length")
        self.content_length = None if length is None else int(length)
        self._body: bytes | None = None

    async def read(self, most_bytes: int = ANSWER_BYTES, grow: Callable[[int], None] | None = None) -> bytes:
        """Return the whole body, as often as it is called. Raises BadAnswer beyond `most_bytes`.

        `grow` is called with what comes beyond _FREE_BYTES, and may raise.
        """
        if self._body is None:
            body = bytearray()
            while piece := await self.content.readany():
                body += piece
                if len(body) > most_bytes:
                    raise BadAnswer(f"more than {most_bytes} bytes")
                if grow is not None and len(body) > _FREE_BYTES:
                    grow(len(piece))
            self._body = bytes(body)
        return self._body


class EngineConnection:
    """One connection, opened by its first request. `keep`: the engine need not close it after the answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.keep = False
        self.idle_since_s = 0.0  # on the loop's clock, written by the pool
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._protocol = ResponseHandler(self._loop)
        self._opened = self._has_parser = False
        self._content: StreamReader | None = None  # the body of the last answer
        self._upload: asyncio.Task[None] | None = None

    async def request(self, method: str, target: str, pairs: Pairs, body: Payload) -> EngineAnswer:
        """Send a request and return its answer once the head is complete.

        Raises ConnectFailed, BadAnswer, or another aiohttp.ClientError or OSError.
        """
        size = 0 if body is None else len(body) if isinstance(body, bytes) else None
        head = request_head(method, target, pairs, size, keep=self.keep)
        self._content = None
        if not self._opened:
            self._opened = True
            await self._open()
        if method == "HEAD" or not self._has_parser:
            self._make_parser(bodiless=method == "HEAD")
        self._has_parser = False
        transport = self._protocol.transport
        if transport is not None:  # where it is lost already, read() raises the reason
            if isinstance(body, bytes) and len(body) <= READ_BYTES:
                transport.write(head + body)  # one packet
            else:
                transport.write(head)
                if isinstance(body, bytes):
                    transport.write(body)
                elif body is not None:
                    self._upload = asyncio.ensure_future(self._send(body, chunked=in_chunks(pairs, size)))
        try:
            for _ in range(_MOST_INFORMATIONAL):
                message, content = await self._protocol.read()
                if not 100 <= message.code < 200 or message.code == 101:
                    break  # not Continue or Early Hints, which an answer follows
        except HttpProcessingError as error:
            raise BadAnswer(error.message) from error
        self._content = content
        return EngineAnswer(message, content)

    @property
    def reusable(self) -> bool:
        """Whether the last answer was read to its end, and both sides keep the connection."""
        ended = self._content is not None and self._content.at_eof() and (self._upload is None or self._upload.done())
        transport = self._protocol.transport
        # An engine that answers early may not have read the request to its end.
        sent = transport is not None and not transport.get_write_buffer_size()
        return self.keep and ended and sent and self._protocol.is_connected() and not self._protocol.should_close

    def rest(self, since_s: float) -> None:
        """Keep it for the next request, whose answer is most likely one with a body: none then waits for a parser."""
        self.idle_since_s = since_s
        self._make_parser(bodiless=False)
        self._has_parser = True

    def _make_parser(self, *, bodiless: bool) -> None:
        self._protocol.set_response_params(
            skip_payload=bodiless,
            read_until_eof=True,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
        )

    def close(self) -> None:
        """Close it at once. An engine that still works on an answer sees that nothing waits for it."""
        if self._upload is not None:
            self._upload.cancel()
        self._protocol.abort()

    async def _open(self) -> None:
        opening = asyncio.ensure_future(self._connect())
        try:
            # Not wait_for(): before Python 3.12 it loses a cancellation that comes together with the connection.
            await asyncio.wait({opening}, timeout=_CONNECT_S)
        finally:
            opened = opening.done()
            opening.cancel()
        error = opening.result() if opened else asyncio.TimeoutError()
        if error is not None:
            raise ConnectFailed(str(error)) from error

    async def _connect(self) -> Exception | None:
        """Return the error of connect(), None once it is open."""
        path, port = self._endpoint.socket_path, self._endpoint.port
        try:
            if port is None:
                await self._loop.create_unix_connection(lambda: self._protocol, path)
            else:
                await self._loop.create_connection(lambda: self._protocol, "127.0.0.1", port)
        except OSError as error:
            return error
        return None

    async def _send(self, pieces: AsyncIterator[bytes], *, chunked: bool) -> None:
        """Write a body piece by piece, while the head of the answer is awaited: it may be a refusal of the rest."""
        writer = StreamWriter(self._protocol, self._loop)
        if chunked:
            writer.enable_chunking()
        try:
            async for piece in pieces:
                await writer.write(piece)
            await writer.write_eof()
        except Exception as error:  # of the client, whose body ended too early, or of this connection
            self._protocol.set_exception(ClientConnectionError("the body was not sent to its end"), error)
