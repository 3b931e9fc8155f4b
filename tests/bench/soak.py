"""Good and bad load for a long time, under which memory stays flat: `python -m tests.bench.soak [--minutes 30]`

`edgellm up` with the real engine and the demo model. Clients ask for answers and streams without a pause; others send
what is no HTTP, headers that never end, bodies that are too large or no JSON, unknown models and routes, and leave in
mid-answer. After a tenth of the time is the first reading, at the end the last. Exit code 1 where a limit is exceeded.
"""

from __future__ import annotations

import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx

from edge.linux.procfs import read_usage
from edge.models.pull import pull
from tests.bench.rows import Row, bench_parser, report
from tests.bench.supervisor import Load
from tests.conftest import CACHE
from tests.serving import DEMO, Up, eventually

CONFIG = "schema = 1\n[telemetry]\njtop = 'off'\n"
PROBE_S = 0.2
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b"
STREAM = b'{"messages": [{"role": "user", "content": "Count."}], "max_tokens": 64, "stream": true}'
DEEP = b"[" * 100_000


class Bad:
    """Clients that misbehave, one after the other, until `over`."""

    def __init__(self, port: int, over: threading.Event, seed: int) -> None:
        self.port, self.over, self.chance = port, over, random.Random(seed)
        self.sent: Counter[str] = Counter()
        self.ways: dict[str, Callable[[socket.socket], None]] = {
            "no HTTP": lambda line: line.sendall(self.chance.randbytes(200) + b"\r\n\r\n"),
            "headers without an end": self.slow_headers,
            "a body of 1 GB": lambda line: line.sendall(REQUEST % (1 << 30, b"x" * 1000)),
            "a body that is no JSON": lambda line: line.sendall(REQUEST % (len(DEEP), DEEP)),
            "an unknown model": self.unknown,
            "an unknown route": lambda line: line.sendall(b"GET /%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n"),
            "leaves in mid-answer": self.leaves,
        }

    def run(self) -> None:
        while not self.over.is_set():
            name = self.chance.choice(list(self.ways))
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as line:
                self.ways[name](line)
                line.recv(4096)
            self.sent[name] += 1
            time.sleep(0.05)

    def slow_headers(self, line: socket.socket) -> None:
        line.sendall(b"GET / HTTP/1.1\r\n")
        for number in range(20):
            line.sendall(b"X-%d: %s\r\n" % (number, b"y" * 2000))
            time.sleep(0.01)

    def unknown(self, line: socket.socket) -> None:
        body = b'{"model": "%b", "messages": []}' % self.chance.randbytes(8).hex().encode()
        line.sendall(REQUEST % (len(body), body))

    def leaves(self, line: socket.socket) -> None:
        line.sendall(REQUEST % (len(STREAM), STREAM))
        line.recv(200)


class Probe:
    """Asks /livez all the time."""

    def __init__(self, url: str, over: threading.Event) -> None:
        self.url, self.over = url, over
        self.times_s: list[float] = []
        self.failed = 0

    def run(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self.over.is_set():
                began = time.perf_counter()
                try:
                    client.get(f"{self.url}/livez").raise_for_status()
                except httpx.HTTPError:
                    self.failed += 1
                self.times_s.append(time.perf_counter() - began)
                time.sleep(PROBE_S)


def reading(up: Up) -> dict[str, float]:
    process = Path(f"/proc/{up.process.pid}")
    usage = read_usage(up.process.pid)
    assert usage is not None
    return {
        "RssAnon, MB": usage.rss_anon_bytes / 1e6,
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
    }


def measure(minutes: float) -> Iterator[Row]:
    model = Path(pull(DEMO, CACHE / "models").path)
    with tempfile.TemporaryDirectory(prefix="e-", dir="/tmp") as folder:
        state = Path(folder)
        (state / "config").mkdir()
        (state / "config/edgellm.toml").write_text(CONFIG)
        with Up(state, "-p", "cpu", "-m", f"demo={model}", "--set", "n_ctx=2048") as up:
            up.wait_for("ok", "degraded")
            yield from soak(up, minutes * 60)


def soak(up: Up, seconds: float) -> Iterator[Row]:
    over = threading.Event()
    bad, probe = [Bad(up.port, over, seed) for seed in range(2)], Probe(up.url, over)
    threads = [threading.Thread(target=each.run) for each in (*bad, probe)]
    with Load(up.url, clients=2) as load:
        for thread in threads:
            thread.start()
        time.sleep(seconds / 10)
        first = reading(up)
        time.sleep(seconds * 9 / 10)
        over.set()
        for thread in threads:
            thread.join()
    # What ended is given back before the last reading.
    eventually(lambda: reading(up)["descriptors"] <= first["descriptors"] + 4, "the descriptors are closed", 180)
    last = reading(up)
    yield Row("minutes", seconds / 60, "")
    yield Row("answers", load.seen["answered"], "")
    yield Row("requests that misbehaved", sum(sum(each.sent.values()) for each in bad), "")
    yield Row("good requests without an answer or a clear error", len(load.unclear), "", 0)
    for name, before in first.items():
        yield Row(f"{name}, after a tenth of the time", before, "")
        yield Row(f"{name}, at the end", last[name], "", 60.0 if "Rss" in name else before + 4)
    times = sorted(probe.times_s)
    yield Row(f"/livez, median of {len(times)}", times[len(times) // 2] * 1000, "ms")
    yield Row("/livez, longest", times[-1] * 1000, "ms", 1000.0)
    yield Row("/livez that failed", probe.failed, "", 0)
    for text in load.unclear[:3]:
        print(text, file=sys.stderr)
    restarts = up.healthz()["models"]["demo"]["restarts"]
    yield Row("restarts of the engine", restarts, "", 0)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    arguments = parser.parse_args()
    return report(list(measure(arguments.minutes)), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
