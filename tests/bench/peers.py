"""Measure the first answer of edgellm and of its peers, in interleaved turns: the same model, from exec to one token.

    python tests/bench/peers.py MODEL.gguf --engine PATH/llama-server [--turns 20] [--cold] [--threads N]

bare, same flags   llama-server with the plan's command line and environment, asked every 2 ms
bare, defaults     llama-server -m MODEL
router             llama-server --models-dir, which starts a llama-server for the model that the request names
naive service      llama-server -m MODEL --no-warmup, and a script that looks at /health once a second before it asks
xllamacpp          the wheel's Server in the client's own process; only where it is installed
edgellm up         with a remembered launch, as at every start but the first

Prints a table for docs/numbers.md: medians with 95 % intervals, and the median of the ratios to edgellm in each turn.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edge.bench.load import health  # a script: the checkout has to be found first
from edge.linux.procfs import drop_pages
from tests.bench.engine_ready import chosen
from tests.bench.first_answer import BODY, bare, first_answer, interval, under_edgellm
from tests.bench.rows import engine_parser, up_arguments
from tests.serving import free_port

IN_PROCESS = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(params)
answer = server.handle_chat_completions(json.loads(sys.argv[3]))
assert (answer if isinstance(answer, dict) else json.loads(answer))["choices"], answer
"""
NAIVE_LOOK_S = 1.0  # as in most unit files and compose files that wait for a server


def main() -> None:
    parser = engine_parser(__doc__, threads=os.cpu_count() or 1)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--cold", action="store_true", help="drop the model's pages before each start")
    options = parser.parse_args()
    if not options.engine:
        parser.error("--engine PATH is needed: a llama-server for all ways")
    state, common = Path(tempfile.mkdtemp(prefix="e-")), up_arguments(options)
    taken: dict[str, list[float]] = {}
    try:
        plan = chosen(common, state)
        ways = peers(options, plan, state)
        port = free_port()
        ways["edgellm up"] = lambda: under_edgellm(common, state, port)[0]
        for number in range(options.turns + 1):
            for name, way in ways.items():
                if options.cold:
                    drop_pages(options.model)
                took = way()
                if number:  # the first turn warms caches, and leaves a launch to remember
                    taken.setdefault(name, []).append(took)
            print(f"turn {number} of {options.turns}", file=sys.stderr)
    finally:
        shutil.rmtree(state, ignore_errors=True)
    report(taken)


def peers(options: argparse.Namespace, plan: Mapping[str, Any], state: Path) -> dict[str, Callable[[], float]]:
    engine, model, threads = str(options.engine), str(options.model), str(options.threads)
    folder = state / "models"
    folder.mkdir(parents=True)
    (folder / options.model.name).symlink_to(options.model.resolve())
    defaults = [engine, "-m", model, "-t", threads]
    routed = json.dumps(json.loads(BODY) | {"model": options.model.stem}).encode()
    ways: dict[str, Callable[[], float]] = {
        "bare, same flags": lambda: bare(dict(plan), state / "bare.sock"),
        "bare, defaults": lambda: asked(defaults, state / "defaults.sock"),
        "router": lambda: router([engine, "--models-dir", str(folder), "-t", threads], routed),
        "naive service": lambda: naive([*defaults, "--no-warmup"], state / "naive.sock"),
    }
    if importlib.util.find_spec("xllamacpp"):
        ways["xllamacpp"] = lambda: in_process(model, threads)
    return ways


def started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


def ended(child: subprocess.Popen[bytes]) -> None:
    child.terminate()  # a router ends its children
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def asked(command: Sequence[str], path: Path) -> float:
    """Ask every 2 ms until a completion comes back."""
    path.unlink(missing_ok=True)

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    began = time.monotonic()
    child = started([*command, "--host", str(path)])
    try:
        return first_answer(connect, child) - began
    finally:
        ended(child)


def router(command: Sequence[str], body: bytes) -> float:
    """Send the first request as soon as the router listens: it loads the model and answers."""
    port = free_port()
    began = time.monotonic()
    child = started([*command, "--host", "127.0.0.1", "--port", str(port)])
    try:
        while True:
            assert child.poll() is None, "the router ended"
            if complete(("127.0.0.1", port), body):
                return time.monotonic() - began
            time.sleep(0.002)
    finally:
        ended(child)


def naive(command: Sequence[str], path: Path) -> float:
    path.unlink(missing_ok=True)
    began = time.monotonic()
    child = started([*command, "--host", str(path)])
    try:
        while health(path) != 200:
            assert child.poll() is None, "the engine ended"
            time.sleep(NAIVE_LOOK_S)
        assert complete(str(path), BODY.encode())
        return time.monotonic() - began
    finally:
        ended(child)


def complete(address: str | tuple[str, int], body: bytes) -> bool:
    """Send one completion over a unix socket or TCP; return whether it was answered with 200."""
    connection = http.client.HTTPConnection("localhost", timeout=300)
    try:
        connection.sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        connection.sock.settimeout(300)
        connection.sock.connect(address)
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except OSError:
        return False
    finally:
        connection.close()


def in_process(model: str, threads: str) -> float:
    began = time.monotonic()
    command = [sys.executable, "-c", IN_PROCESS, model, threads, BODY]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.monotonic() - began


def report(taken: Mapping[str, Sequence[float]]) -> None:
    ours = taken["edgellm up"]
    print(f"| first answer, {len(ours)} turns | median | 95 % interval | of edgellm's |\n|---|---|---|---|")
    for name, values in taken.items():
        ratio = statistics.median(theirs / each for theirs, each in zip(values, ours, strict=True))
        print(f"| {name} | {statistics.median(values):.2f} s | {interval(list(values))} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
