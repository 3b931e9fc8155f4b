"""Measure what the gateway adds to a fake engine that is asked directly: `python -m tests.bench.gateway [--json]`.

Runs are interleaved (direct, gateway, direct, …) and medians are shown, since a shared machine drifts. Needs gcc.
Costs are CPU time of the gateway's process. Exit code 1 where a limit of the table is exceeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge.gateway.ollama import read_call
from edge.gateway.ollama_answer import OllamaAnswer
from tests.bench.rows import Row, bench_parser, report

SOURCES = Path(__file__).resolve().parents[1] / "fakes" / "upstream"
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")
HEAD = "POST /v1/chat/completions?{} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Bench:
    """The fake engine and the gateway in front of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.direct, self.through = free_port(), free_port()
        for name in ("upstream", "load"):
            source = SOURCES / f"{name}.c"
            subprocess.run(["gcc", "-O2", "-o", folder / name, source], check=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        path = self._folder / "engine.sock"
        engine = subprocess.Popen([self._folder / "upstream", str(self.direct), path])
        while not path.exists():
            time.sleep(0.01)
        command = [sys.executable, "-m", "tests.bench.gateway_child", path, str(self.through)]
        self.gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert self.gateway.stdout is not None
            self.gateway.stdout.readline()
            yield
        finally:
            for child in (self.gateway, engine):
                child.terminate()
                child.wait()

    def load(self, *arguments: object) -> dict[str, Any]:
        command = [str(self._folder / "load"), *(str(argument) for argument in arguments)]
        result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return result

    def cpu_us(self) -> float:
        fields = Path(f"/proc/{self.gateway.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_US

    def anonymous_mib(self) -> float:
        status = Path(f"/proc/{self.gateway.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1024

    def held(self) -> dict[str, int]:
        assert self.gateway.stdout is not None
        self.gateway.send_signal(signal.SIGUSR1)
        held: dict[str, int] = json.loads(self.gateway.stdout.readline())
        return held

    def stats(self) -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.direct}/stats") as answer:
            stats: dict[str, int] = json.loads(answer.read())
            return stats


def requests(bench: Bench, rounds: int) -> Iterator[Row]:
    added, cost = [], []
    for _ in range(rounds):
        direct = bench.load("latency", bench.direct, 1, 1000)
        before = bench.cpu_us()
        through = bench.load("latency", bench.through, 1, 1000)
        cost.append((bench.cpu_us() - before) / 1000)
        added.append((through["p50"] - direct["p50"]) / 1000)
    yield Row("added per request, p50", statistics.median(added), "ms", 0.35)
    yield Row("CPU per request", statistics.median(cost), "µs")


def first_chunks(bench: Bench, rounds: int) -> Iterator[Row]:
    added = []
    for _ in range(rounds * 10):
        direct = bench.load("stream", bench.direct, 1, 2, 100)["first_p50"]
        added.append((bench.load("stream", bench.through, 1, 2, 100)["first_p50"] - direct) / 1000)
    yield Row("added to the first chunk, p50", statistics.median(added), "ms", 0.8)


def chunks(bench: Bench, rounds: int) -> Iterator[Row]:
    cost, delays, many = [], [], []
    for _ in range(rounds):
        before = bench.cpu_us()
        seen = bench.load("stream", bench.through, 8, 200, 50)
        cost.append((bench.cpu_us() - before) / seen["count"])
        delays.append(seen["p50"] / 1000)
        many.append(bench.load("stream", bench.through, 32, 200, 50)["p50"] / 1000)
    yield Row("CPU per chunk, 8 streams × 50/s", statistics.median(cost), "µs", 160)
    ollama_us = statistics.median(cost) + translation_us()
    yield Row("CPU per chunk of an Ollama stream: the same, and its translation", ollama_us, "µs", 200)
    yield Row("chunk delay, 8 streams × 50/s, p50", statistics.median(delays), "ms")
    yield Row("chunk delay, 32 streams × 50/s, p50", statistics.median(many), "ms", 2.0)


def translation_us(count: int = 5000) -> float:
    """Return the CPU time to make a line of Ollama's of one event of llama-server's."""
    request = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
    answer = OllamaAnswer(read_call("/api/chat", json.dumps(request).encode()), time.monotonic, time.time)
    answer.sent()
    choice = {"finish_reason": None, "index": 0, "delta": {"content": " word"}}
    about = {
        "created": 1796025808,
        "id": "chatcmpl-0123456789abcdef",
        "model": "chat",
        "object": "chat.completion.chunk",
    }
    event = b"data: " + json.dumps({"choices": [choice], **about}).encode() + b"\n\n"
    began_ns = time.process_time_ns()
    for _ in range(count):
        assert answer.feed(event)
    return (time.process_time_ns() - began_ns) / count / 1000


def upload(bench: Bench) -> Iterator[Row]:
    size = 20 * 2**20
    with socket.create_connection(("127.0.0.1", bench.through)) as client:
        client.sendall(HEAD.format("stream=0", size).encode())
        before, peak, sent, piece = bench.anonymous_mib(), 0.0, 0, b"x" * 2**18
        while sent < size:
            client.sendall(piece)
            sent += len(piece)
            peak = max(peak, bench.anonymous_mib())
        client.recv(4096)
    yield Row("memory for an upload of 20 MB", peak - before, "MiB", 2.0)


KINDS = {
    "in mid-stream": "stream=1&n=100000&rate=50",
    "between two chunks": "stream=1&n=100&rate=0.5",
    "before the first token": "stream=1&n=10&delay=20000",
    "waiting for an answer in one piece": "stream=0&delay=20000",
}


def leaving(bench: Bench, rounds: int) -> Iterator[Row]:
    """From the client's close to the moment the engine sees it; both read the same monotonic clock."""
    for kind, query in KINDS.items():
        for reset in (False, True):
            took = []
            for _ in range(rounds):
                seen = bench.stats()["disconnects"]
                client = socket.create_connection(("127.0.0.1", bench.through))
                client.sendall((HEAD.format(query, 2) + "{}").encode())
                time.sleep(0.3)
                if reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                left = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                client.close()
                while (stats := bench.stats())["disconnects"] == seen:
                    time.sleep(0.005)
                took.append((stats["last_disconnect"] - left) / 1e6)
            name = f"{kind}, {'RST' if reset else 'FIN'}: upstream closed after"
            yield Row(name, statistics.median(took), "ms", 50.0)


async def cancels(bench: Bench, count: int) -> None:
    """`count` requests, 32 at a time; three of ten leave early, at some moment of a stream."""
    turn = asyncio.Semaphore(32)

    async def one(number: int) -> None:
        async with turn:
            early = number % 10 < 3
            query = "stream=1&n=50&rate=100" if early else "stream=0"
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.through)
            writer.write((HEAD.format(query, 2) + "{}").encode())
            if early:
                await asyncio.sleep(0.002 * (number % 13))
                if number % 2:
                    writer.transport.abort()
            else:
                await reader.readuntil(b'"}')
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    await asyncio.gather(*(one(number) for number in range(count)))


def leftovers(bench: Bench, count: int) -> Iterator[Row]:
    before = bench.held()
    asyncio.run(cancels(bench, count))
    for _ in range(200):
        after = bench.held()
        if after["connections"] == 0 and after["descriptors"] <= before["descriptors"]:
            break
        time.sleep(0.05)
    share = after["gone"] / count
    yield Row(f"clients of {count} that left early", 100 * share, "%")
    for name in ("connections", "tasks", "descriptors", "active", "open"):
        yield Row(f"{name} left behind", max(0, after[name] - before[name]), "", 0)
    yield Row("anonymous memory after all of it", bench.anonymous_mib(), "MiB", 40.0)


def measure(rounds: int, count: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        bench = Bench(Path(folder))
        with bench.running():
            bench.load("latency", bench.through, 4, 500)  # warm
            rows = [*requests(bench, rounds), *first_chunks(bench, rounds), *chunks(bench, rounds)]
            return [*rows, *upload(bench), *leaving(bench, rounds), *leftovers(bench, count)]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=10_000, help="for the early cancels")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.requests)
    return report(rows, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
