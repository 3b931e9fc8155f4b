"""Floods of connections against a gateway in a process of its own: its memory stays small, probes are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from edge.units import MIB
from tests.bench.gateway import free_port
from tests.fakes.upstream.engine import FakeEngine, Line, Received
from tests.gateway.raw import LIMIT_S, Client, once
from tests.gateway.test_gateway_encoding import zstd

pytestmark = pytest.mark.full
CONNECTIONS = 512
MOST_BYTES = 60 * MIB
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FIELD = b": " + b"y" * 15_000 + b"\r\n"
COOKIES = b"GET /slots HTTP/1.1\r\nHost: localhost\r\n" + b"Cookie" + FIELD + b"Cookie" + FIELD + b"\r\n"
BOMB = zstd.compress(b"\0" * (256 * MIB))
# Unpacks to 8 MiB in the largest window, with 200 KB that are on the wire as they are; without its last byte.
LARGE_WINDOW = {zstd.CompressionParameter.window_log: 23, zstd.CompressionParameter.content_size_flag: 0}
PACKED = zstd.compress(random.Random(1).randbytes(200_000) + b"\0" * (8 * MIB), options=LARGE_WINDOW)[:-1]


class Flooded:
    """The gateway's process and the clients that hold it."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self.clients: list[Client] = []

    def rss_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    async def connect(self, data: bytes) -> None:
        client = await Client.connect(self.port)
        self.clients.append(client)
        client.writer.write(data)  # all of it is on its way, but not awaited: the gateway may read no more
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(client.writer.drain(), 0.5)

    async def probe(self, seconds: float) -> int:
        """Ask for /livez all the time; return the most memory that was seen."""
        most_bytes, until_s = 0, time.monotonic() + seconds
        while time.monotonic() < until_s:
            assert (await asyncio.wait_for(once(self.port, LIVEZ), LIMIT_S)).status == 200
            most_bytes = max(most_bytes, self.rss_bytes())
            await asyncio.sleep(0.05)
        return most_bytes


@pytest.fixture
async def flooded(sockets: Path) -> AsyncIterator[Flooded]:
    async def silent(line: Line, request: Received) -> None:
        await line.until_gone()

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    engine = FakeEngine(sockets / "engine.sock", silent)
    await engine.start()
    port = free_port()
    command = ["-m", "tests.bench.gateway_child", str(engine.path), str(port)]
    child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    found = Flooded(port, json.loads(await child.stdout.readline())["pid"])
    try:
        yield found
    finally:
        child.kill()
        await child.wait()
        for client in found.clients:
            await client.close()
        await engine.stop()


FLOODS: dict[str, Callable[[int], bytes]] = {
    "heads that do not end": lambda number: HEAD + b"A" + FIELD + b"B" + FIELD,
    "heads of two megabytes": lambda number: HEAD + b"".join(b"X-%d" % line + FIELD for line in range(126)) + b"\r\n",
    "uploads that crawl": lambda number: HEAD + b"Content-Length: 1000000\r\n\r\n{",
    "uploads that stop after 240 KB": lambda number: HEAD + b"Content-Length: 1000000\r\n\r\n" + b"{" * 240_000,
    "uploads of zstd that stop": lambda number: (
        HEAD + b"Content-Encoding: zstd\r\nContent-Length: %d\r\n\r\n" % (len(PACKED) + 1) + PACKED
    ),
    "requests that take no slot": lambda number: b"GET /slots HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "pipelined requests with 30 KB of cookies": lambda number: COOKIES * 5,
    "idle connections": lambda number: b"",
    "clients that pipeline requests": lambda number: LIVEZ * 3_000,
    "bodies in chunks of one byte": lambda number: CHUNKED + b"1\r\n{\r\n" * 20_000,
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_connections_costs_little_and_shuts_no_probe_out(flooded: Flooded, kind: str) -> None:
    await flooded.probe(0.2)
    for start in range(0, CONNECTIONS, 64):
        await asyncio.gather(*(flooded.connect(FLOODS[kind](number)) for number in range(start, start + 64)))
    most_bytes = await flooded.probe(3.0)
    assert most_bytes <= MOST_BYTES, f"{most_bytes / MIB:.0f} MiB"


async def test_compressed_bombs_cost_little(flooded: Flooded) -> None:
    request = HEAD + b"Content-Encoding: zstd\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB
    sending = [asyncio.ensure_future(once(flooded.port, request)) for _ in range(8)]
    most_bytes = await flooded.probe(3.0)
    assert {answer.status for answer in await asyncio.gather(*sending)} == {413}
    assert most_bytes <= MOST_BYTES, f"{most_bytes / MIB:.0f} MiB"
