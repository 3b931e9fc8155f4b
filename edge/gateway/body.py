"""Read request bodies: decompressed, kept while small so that they can be sent twice, streamed when large.

llama-server takes no Content-Encoding. All limits hold for the bytes before and after decompression.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web
from aiohttp.streams import StreamReader

from edge.gateway.config import GatewayOptions
from edge.gateway.connections import Connections
from edge.gateway.openai import HttpFault, RejectedError
from edge.units import KIB, MIB, format_bytes

_PIECE_BYTES = 64 * KIB
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# RFC 8878 3.1.1.1.2 recommends 8 MiB; a frame may ask for gigabytes. Clients' usual levels need 2 to 8 MiB.
_ZSTD_WINDOW_LOG = 23
# What an open decoder holds beside its window: tables (zstd 160 KiB, zlib 48 KiB) and input. 512 of them on unfinished
# bodies took 1.2 GiB before they were counted.
_DECODER_BYTES = 256 * KIB
_BLOCK_BYTES = 128 * KIB  # RFC 8878 3.1.1.2.4: a zstd block is unpacked as a whole
_ZLIB_WINDOW_BYTES = 32 * KIB  # RFC 1951: distances of at most 32 KiB
# Of a compressed body that waits: 8 KiB of zstd may unpack to what all waiting bodies may hold. The rest is read later.
_UNPACKED_AHEAD_BYTES = 1 * MIB
# gzip members or zstd frames of one body, pigz and pzstd write one a MiB: each costs 10 µs, and an empty one 8 bytes.
_MOST_MEMBERS = 4096
_MOST_CHUNKS = 128  # kept apart: joining copies all that is there, up to 2 * READ_BYTES


class JoinedChunks(StreamReader):
    """A body in chunks that are joined as they arrive.

    aiohttp keeps each of them, and where it ends, and asks its parser to go on after each that is read: 48 bytes and
    2 µs for a chunk of one byte.
    """

    __slots__ = ()

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        """Take the data of a chunk, or a part of it."""
        paused = super().feed_data(data, size)
        if len(self._buffer) > _MOST_CHUNKS:
            self._join()
        return paused

    def begin_http_chunk_receiving(self) -> None:
        """Keep no list of the ends of chunks: nothing here reads by chunk."""

    def end_http_chunk_receiving(self) -> None:
        """Keep no list of the ends of chunks."""

    def _read_nowait(self, n: int) -> bytes:
        if len(self._buffer) > 1:
            self._join()
        return super()._read_nowait(n)

    def _join(self) -> None:
        joined = b"".join(self._buffer)[self._buffer_offset :]
        self._buffer.clear()
        self._buffer.append(joined)
        self._buffer_offset = 0


def join_chunks(request: web.Request) -> None:
    """Join the chunks of a body, of which nothing was read yet, from now on; do nothing where it has none."""
    content = request.content
    if type(content) is StreamReader and "Transfer-Encoding" in request.headers:
        content.__class__ = JoinedChunks  # aiohttp's parser takes no class; JoinedChunks adds no attribute
        content._http_chunk_splits = None


class Body:
    """One request's body."""

    def __init__(self, request: web.Request, config: GatewayOptions, connections: Connections) -> None:
        """Raises RejectedError if the Content-Length is over the limit."""
        self._request = request
        self._limit = config.max_body_bytes
        self._limits = config.limits
        # Several lines are one list (RFC 9110 5.3): with the first alone the second would reach the engine.
        self._decoder = _decoder(", ".join(request.headers.getall("Content-Encoding", ("identity",))))
        self.decoded = self._decoder is not None  # the client's Content-Length and Content-Encoding do not hold
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._packed = b""  # of a compressed body: not yet given to the decoder
        self._received = 0
        self._seen = 0  # bytes after decompression
        self._began_s: float | None = None
        self._connections = connections
        self.complete = not request.can_read_body
        connections.uploading(request.transport, not self.complete)
        self._digest: str | None = None
        self.sent = False  # a part that is not kept went to the engine: the body cannot be sent again
        self.when_sent: Callable[[], None] | None = None  # called once all of a stream went to the engine
        self.fault: HttpFault | None = None  # the reason for which the stream to the engine was cut short
        length = request.content_length
        # Refused by its length, before a byte of it is read.
        if length is not None and length > self._limit:
            raise RejectedError(self._too_large())

    @property
    def kept_bytes(self) -> int:
        """Return what the body holds in memory, at most what its open decoder may."""
        decoder = 0 if self._decoder is None else self._decoder.held_bytes
        return self._parts_bytes + len(self._packed) + decoder

    @property
    def unpacking_bytes(self) -> int:
        """Return what the decoder may hold while the rest of a compressed body is streamed, 0 for any other body."""
        return 0 if self.complete or self._decoder is None else self._decoder.most_bytes

    @property
    def data(self) -> bytes | None:
        """The bytes kept so far, the whole body if `complete`; None where there are none."""
        if not self._parts:
            return None
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    async def read(self, at_most: int | None = None, grow: Callable[[int], None] | None = None) -> None:
        """Read and keep until the end, or until more than `at_most` bytes are kept. Raises RejectedError.

        `grow` is called with what `kept_bytes` grows by, and may reject it.
        """
        counted = self.kept_bytes
        while not self.complete and (at_most is None or self._seen <= at_most):
            part = await self._next()
            kept = self.kept_bytes + len(part)
            if grow is not None and kept > counted:
                grow(kept - counted)
                counted = kept
            self._parts.append(part)
            self._parts_bytes += len(part)

    async def read_ahead(self, grow: Callable[[int], None]) -> None:
        """Read while the request waits: a plain body, or a bounded part of a compressed one. Raises RejectedError."""
        await self.read(None if self._decoder is None else _UNPACKED_AHEAD_BYTES, grow)
        if not self.complete:  # the rest is read when it is sent: until then the client is not slow
            self._connections.uploading(self._request.transport, False, is_left=True)

    def digest(self) -> str:
        """Return a hash of the declared length and of the first `replay_bytes`: the same for each sending of a body.

        What follows may be on its way to the engine already. It needs a `read` up to `replay_bytes` before.
        """
        if self._digest is not None:
            return self._digest
        hashed = hashlib.sha256(f"{self._request.content_length} ".encode())
        hashed.update((self.data or b"")[: self._limits.replay_bytes])
        return hashed.hexdigest()

    def replace(self, data: bytes) -> None:
        """Send these bytes in place of the client's, which were read to their end."""
        self._parts, self._parts_bytes = [data], len(data)
        self.decoded = True

    def payload(self) -> bytes | AsyncIterator[bytes] | None:
        """Return what the engine gets: bytes or a stream of them."""
        data = self.data
        if not self.complete:
            return self._stream()
        return data if data is None or len(data) <= self._limits.replay_bytes else _pieces(data)

    async def _stream(self) -> AsyncIterator[bytes]:
        self.sent = True
        if self._began_s is not None:  # the client was not read from while the request waited
            allowed_s = self._received / self._limits.body_bytes_per_s
            self._began_s = max(self._began_s, asyncio.get_running_loop().time() - allowed_s)
        self._digest = self.digest()  # what is sent is not kept
        kept, self._parts, self._parts_bytes = self._parts, [], 0
        for part in kept:
            yield part
        while not self.complete:
            try:
                part = await self._next()
            except RejectedError as refused:
                self.fault = refused.fault  # aiohttp's client replaces the exception by one of its own
                raise
            if part:
                yield part
        if self.when_sent is not None:
            self.when_sent()

    async def _next(self) -> bytes:
        """Return the next piece, decompressed; empty at the end."""
        part = b"" if self._decoder is None else self._decoder.more()
        if part:
            await asyncio.sleep(0)  # a small body may unpack to the limit: other requests run in between
        else:
            part = await self._receive()
        self._seen += len(part)
        if self._seen > self._limit:
            raise RejectedError(self._too_large())
        return part

    async def _receive(self) -> bytes:
        content = self._request.content
        if self._began_s is None:
            self._began_s = asyncio.get_running_loop().time()
            self._send_continue()
        part = content.read_nowait()
        if not part and not content.at_eof():
            try:
                part = await asyncio.wait_for(content.readany(), self._limits.body_idle_s)
            except (asyncio.TimeoutError, TimeoutError):
                # The connection is closed by the handler: what still comes would be read as another request.
                raise RejectedError(self._too_slow()) from None
        self._received += len(part)
        if self._received > self._limit:
            raise RejectedError(self._too_large())
        ended = content.at_eof()
        if ended:
            self._connections.uploading(self._request.transport, False)
        else:
            self._check_pace()
        if self._decoder is None:
            self.complete = ended
            return part
        self._packed += part
        if not ended and len(self._packed) < _PIECE_BYTES:  # a body that crawls opens no decoder
            return b""
        part, self._packed = self._decoder.feed(self._packed), b""
        self.complete = ended and not part
        if self.complete:
            self._decoder.finish()
        return part

    def _send_continue(self) -> None:
        """Ask for the body only now: a client that was rejected before this has not sent it."""
        expect = self._request.headers.get("Expect", "")
        transport = self._request.transport
        if expect.lower() == "100-continue" and transport is not None:
            transport.write(CONTINUE)

    def _check_pace(self) -> None:
        if self._began_s is None:
            return
        took_s = asyncio.get_running_loop().time() - self._began_s
        # Not in the first seconds: a mobile or TLS upload starts slowly.
        if took_s > self._limits.body_idle_s and self._received < took_s * self._limits.body_bytes_per_s:
            raise RejectedError(self._too_slow())

    def _too_large(self) -> HttpFault:
        limit = format_bytes(self._limit)
        return HttpFault(
            413, "body_too_large", f"the request body is larger than {limit}", "raise max_body_bytes in [gateway]"
        )

    def _too_slow(self) -> HttpFault:
        return HttpFault(408, "body_too_slow", "the request body came too slowly", "send it without pauses")


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """Yield a large body in pieces, so that writing it does not block the event loop."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


class _Decoder:
    """Decompresses one body in pieces of bounded size, whatever it unpacks to."""

    def __init__(self, start: Callable[[bytes], Any]) -> None:
        """`start` returns a decompressor for a stream that begins with these bytes."""
        self._start = start
        self._stream: Any = None
        self._rest = b""
        self._window_bytes = self._given_bytes = self._members = 0

    @property
    def held_bytes(self) -> int:
        """Return what it holds in the middle of a stream, 0 between two. Of a window the part that was written."""
        return 0 if self._stream is None else min(self._window_bytes, self._given_bytes + _BLOCK_BYTES) + _DECODER_BYTES

    @property
    def most_bytes(self) -> int:
        """Return what it may hold until the end of a body."""
        window = _ZLIB_WINDOW_BYTES if self._start is not _zstd else self._window_bytes or 1 << _ZSTD_WINDOW_LOG
        return window + _DECODER_BYTES

    def feed(self, data: bytes) -> bytes:
        """Return what the next bytes unpack to, at most _PIECE_BYTES. Raises RejectedError."""
        self._rest += data
        return self.more()

    def more(self) -> bytes:
        """Return the next piece of what was fed; empty where more input is needed. Raises RejectedError."""
        try:
            while self._rest or self._stream is not None:
                data, self._rest = self._rest, b""
                if self._stream is None:
                    self._members += 1
                    if self._members > _MOST_MEMBERS:
                        raise RejectedError(_bad_encoding(f"it has more than {_MOST_MEMBERS} parts"))
                    self._stream, self._given_bytes = self._start(data), 0
                    self._window_bytes = _zstd_window_bytes(data) if self._start is _zstd else _ZLIB_WINDOW_BYTES
                part: bytes = self._stream.decompress(data, _PIECE_BYTES)
                self._given_bytes += len(part)
                self._rest = self._stream.unused_data or getattr(self._stream, "unconsumed_tail", b"")
                if self._stream.eof:  # what follows is the next member of a gzip file, or the next zstd frame
                    self._stream = None
                elif not part:
                    return b""
                if part:
                    return part
        except (zlib.error, ValueError, EOFError) as error:
            raise RejectedError(_bad_encoding(str(error))) from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # imported with the first zstd body only
                raise
            raise RejectedError(_bad_encoding(str(error))) from error
        return b""

    def finish(self) -> None:
        """Raises RejectedError if the body ended inside a compressed stream."""
        if self._stream is not None:
            raise RejectedError(_bad_encoding("it ends too early"))


def _decoder(encoding: str) -> _Decoder | None:
    """Return a decoder for a Content-Encoding, None for an uncompressed body. Raises RejectedError."""
    name = encoding.strip().lower()
    if name in ("identity", ""):
        return None
    start = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "zstd": _zstd}.get(name)
    if start is None:
        hint = "send it as zstd, gzip or deflate, or uncompressed"
        raise RejectedError(
            HttpFault(415, "unsupported_encoding", f"Content-Encoding {name[:50]!r} is not supported", hint)
        )
    return _Decoder(start)


def _gzip(first: bytes) -> Any:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _deflate(first: bytes) -> Any:
    """Return a decompressor of zlib's format (RFC 9110 8.4.1.2), or without its header, as some clients send it."""
    with_header = first[0] & 0x0F == 8 and (len(first) < 2 or (first[0] * 256 + first[1]) % 31 == 0)
    return zlib.decompressobj(zlib.MAX_WBITS if with_header else -zlib.MAX_WBITS)


def _zstd(first: bytes) -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})


def _zstd_window_bytes(frame: bytes) -> int:
    """Return the window that a zstd frame asks for (RFC 8878 3.1.1.1), at most what it gets."""
    most = 1 << _ZSTD_WINDOW_LOG
    if len(frame) < 14 or not frame.startswith(b"\x28\xb5\x2f\xfd"):
        return most
    flags = frame[4]
    if flags & 0x20:  # a single segment: the window is the content, whose size follows the dictionary's id
        at, length = 5 + (0, 1, 2, 4)[flags & 3], 1 << (flags >> 6)
        return min(most, int.from_bytes(frame[at : at + length], "little") + (256 if length == 2 else 0))
    exponent, mantissa = frame[5] >> 3, frame[5] & 7
    return min(most, (1 << (10 + exponent)) // 8 * (8 + mantissa))


def _bad_encoding(why: str) -> HttpFault:
    return HttpFault(
        400, "bad_encoding", f"the request body cannot be decompressed: {why}", "check its Content-Encoding"
    )
