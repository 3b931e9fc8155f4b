"""Memory and probes of a whole `edgellm up` during floods: `python -m tests.bench.floods [--seconds N] [--json]`

Each flood meets a process of its own with a stub of an engine: the connections of
tests/gateway/test_gateway_floods.py, compressed bodies, TLS handshakes that do not end, and an engine that floods its
log. `/livez` is asked over new connections all the time. Exit code 1 where a limit is exceeded.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

import trustme

from edge.linux.procfs import read_usage
from edge.models.pull import pull
from edge.units import MIB
from tests.bench.rows import Row, bench_parser, report
from tests.conftest import CACHE
from tests.fakes import llama_switches
from tests.gateway.test_gateway_floods import BOMB, CONNECTIONS, FLOODS, HEAD
from tests.serving import DEMO, Up, eventually

CONFIG = "schema = 1\n[telemetry]\njtop = 'off'\n"
MOST_MIB = 60.0
LIVEZ_MS = 1000.0
PAUSE_S = 0.02
BOMBS = 8
# A record of a handshake that claims 512 bytes of ClientHello and brings 64.
HELLO_PART = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 53
HANDSHAKES = 1024  # half of them with a part of a ClientHello


class Probe:
    """Asks `/livez` over new connections until `over`, and reads the memory of the process."""

    def __init__(self, up: Up, context: ssl.SSLContext | None) -> None:
        self.up, self.context = up, context
        self.over = threading.Event()
        self.times_ms: list[float] = []
        self.failed = 0
        self.most_mib = 0.0

    def run(self) -> None:
        while not self.over.is_set():
            began = time.perf_counter()
            if not answers(self.up.port, self.context):
                self.failed += 1
            self.times_ms.append((time.perf_counter() - began) * 1000)
            self.most_mib = max(self.most_mib, memory_mib(self.up))
            time.sleep(PAUSE_S)


def answers(port: int, context: ssl.SSLContext | None) -> bool:
    line = HTTPConnection("127.0.0.1", port, timeout=30)
    if context is not None:
        line = HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
    try:
        line.request("GET", "/livez")
        return line.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        line.close()


def memory_mib(up: Up) -> float:
    usage = read_usage(up.process.pid)
    assert usage is not None, "edgellm is gone"
    return usage.rss_anon_bytes / MIB


@contextmanager
def serving(state: Path, model: Path, *, tls: str = "", engine: Path | None = None) -> Iterator[Up]:
    (state / "config").mkdir(parents=True)
    (state / "config/edgellm.toml").write_text(CONFIG + tls)
    program = engine or llama_switches.write_fake(state / "engine", load_s=0.1)
    arguments = ("-p", "cpu", "-m", f"demo={model}", "--engine", str(program), "--set", "n_ctx=2048")
    with Up(state, *arguments) as up:
        yield up


def flood(
    up: Up,
    what: str,
    seconds: float,
    begin: Callable[[list[socket.socket]], None],
    context: ssl.SSLContext | None = None,
) -> Iterator[Row]:
    eventually(lambda: answers(up.port, context), lambda: f"/livez answers: {up.output}")
    eventually(lambda: '"ready"' in up.output.lower(), lambda: f"it is ready: {up.output}")
    probe, held = Probe(up, context), list[socket.socket]()
    before_mib = memory_mib(up)
    thread = threading.Thread(target=probe.run)
    thread.start()
    try:
        begin(held)
        time.sleep(seconds)
    finally:
        probe.over.set()
        thread.join()
        for line in held:
            line.close()
    yield Row(f"{what}: anonymous memory before", before_mib, "MiB")
    yield Row(f"{what}: most anonymous memory", probe.most_mib, "MiB", MOST_MIB)
    times = sorted(probe.times_ms)
    yield Row(f"{what}: /livez, median of {len(times)}", times[len(times) // 2], "ms")
    yield Row(f"{what}: /livez, longest", times[-1], "ms", LIVEZ_MS)
    yield Row(f"{what}: /livez that failed", probe.failed, "", 0)


def sending(port: int, data: Callable[[int], bytes], count: int) -> Callable[[list[socket.socket]], None]:
    """Return a flood of connections that send something and stay."""

    def begin(held: list[socket.socket]) -> None:
        for number in range(count):
            with suppress(OSError):  # refused, or closed in the middle: that is the gateway's defence
                line = socket.create_connection(("127.0.0.1", port), timeout=2)
                held.append(line)
                line.sendall(data(number))

    return begin


def measure(seconds: float) -> Iterator[Row]:
    model = Path(pull(DEMO, CACHE / "models").path)
    with tempfile.TemporaryDirectory(prefix="e-", dir="/tmp") as folder:
        for number, (what, data) in enumerate(FLOODS.items()):
            state = Path(folder) / f"connections-{number}"
            with serving(state, model) as up:
                silent = what == "requests that take no slot"
                begin = sending(up.port, data, CONNECTIONS)
                yield from flood(up, f"{CONNECTIONS} {what}", seconds, stopped(state, begin) if silent else begin)
                if silent:
                    os.kill(llama_switches.starts(state / "engine")[-1], signal.SIGCONT)
        with serving(Path(folder) / "bombs", model) as up:
            request = HEAD + b"Content-Encoding: zstd\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB
            begin = sending(up.port, lambda _: request, BOMBS)
            yield from flood(up, f"{BOMBS} bodies of 256 MiB in {len(BOMB) >> 10} KiB of zstd", seconds, begin)
        yield from handshakes(Path(folder) / "tls", model, seconds)
        yield from logs(Path(folder), model, seconds)


def stopped(state: Path, begin: Callable[[list[socket.socket]], None]) -> Callable[[list[socket.socket]], None]:
    """Return the flood with an engine that answers nothing."""

    def first(held: list[socket.socket]) -> None:
        os.kill(llama_switches.starts(state / "engine")[-1], signal.SIGSTOP)
        begin(held)

    return first


def handshakes(state: Path, model: Path, seconds: float) -> Iterator[Row]:
    state.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(state / "key.pem")
    issued.cert_chain_pems[0].write_to_path(state / "cert.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    tls = f"[gateway]\ntls_cert = '{state / 'cert.pem'}'\ntls_key = '{state / 'key.pem'}'\n"
    with serving(state, model, tls=tls) as up:
        begin = sending(up.port, lambda number: HELLO_PART if number % 2 else b"", HANDSHAKES)
        yield from flood(up, f"{HANDSHAKES} TLS handshakes that do not end", seconds, begin, context)


def logs(folder: Path, model: Path, seconds: float) -> Iterator[Row]:
    """An engine serves and prints as fast as its pipe takes it, in lines and without line ends."""
    for name, text in (("lines", "x" * 99 + "\\n"), ("one endless line", "x" * 4096)):
        state = folder / name.split()[0]
        fake = llama_switches.write_fake(state / "engine", load_s=0.1)
        go, script = state / "go", state / "engine" / "flood.sh"
        wait = f"import os, time\nwhile not os.path.exists('{go}'): time.sleep(0.05)\n"
        printing = f"{wait}while True: os.write(2, b'{text}' * 100)"
        # The program's own questions (--help, --version) get no flood.
        script.write_text(
            f'#!/bin/sh\n# {llama_switches.PROGRESS_MARK}\ncase "$*" in *--model*|*"-m "*) '
            f'"{sys.executable}" -S -c "{printing}" & ;; esac\nexec "{fake}" "$@"\n'
        )
        script.chmod(0o755)
        with serving(state, model, engine=script) as up:
            yield from flood(up, f"an engine prints {name}", seconds, lambda _, go=go: go.touch())  # type: ignore[misc]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each flood, after its connections are made")
    arguments = parser.parse_args()
    return report(list(measure(arguments.seconds)), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
