"""Measure the first answer after a start, in interleaved turns: the bare engine, `up` that plans, `up` that remembers.

    python tests/bench/first_answer.py MODEL.gguf [--pairs 20] [--cold] [--profile cpu] [--engine ID|PATH] [--threads N]

Each turn counts from exec to the answer of a chat completion of one token. The bare engine gets the plan's own command
line and environment, and is asked every 2 ms. `--cold` drops the model's pages from the page cache before each turn.
Prints medians with 95 % intervals (order statistics), and the launcher's CPU time until the spawn.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.engine_ready import chosen  # a script: the checkout has to be found first
from tests.serving import environment, free_port

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0})


def main() -> None:
    options = parse()
    state = Path(tempfile.mkdtemp(prefix="e-"))
    # A command line of its own for each way: the remembered launch belongs to one.
    common = ["-p", options.profile, "-m", f"demo={options.model}"]
    common += ["--engine", options.engine] if options.engine else []
    common += ["--set", f"n_threads={options.threads}"] if options.threads else []
    results: dict[str, list[float]] = {"bare": [], "up, planned": [], "up, remembered": []}
    cpu: dict[str, list[float]] = {"up, planned": [], "up, remembered": []}
    port = free_port()
    try:
        plan = chosen(common, state)
        for number in range(options.pairs + 1):
            for way, values in results.items():
                if options.cold:
                    drop(options.model)
                if way == "bare":
                    took = bare(plan, state / "bare.sock")
                else:
                    if way == "up, planned":
                        (state / "state/main/launch.json").unlink(missing_ok=True)
                    took, record = under_edgellm(common, state, port)
                    assert not number or record["remembered"] is (way == "up, remembered"), (way, record)
                if number:  # the first turn warms caches and leaves the record to remember
                    values.append(took)
                    if way != "bare":
                        cpu[way].append(record["spawn_cpu_s"])
    finally:
        shutil.rmtree(state, ignore_errors=True)
    for way, values in results.items():
        line = f"{way:16} first answer {statistics.median(values):.3f} s {interval(values)}"
        spent = cpu.get(way)
        print(line + (f", spawn after {statistics.median(spent) * 1e3:.0f} ms of CPU" if spent else ""), flush=True)
    for way in ("up, planned", "up, remembered"):
        differences = [ours - theirs for ours, theirs in zip(results[way], results["bare"], strict=True)]
        print(f"{way} - bare: {statistics.median(differences) * 1e3:+.0f} ms {interval(differences)}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--engine")
    parser.add_argument("--cold", action="store_true")
    return parser.parse_args()


def interval(values: list[float]) -> str:
    """Return the 95 % interval of the median by order statistics (binomial, normal approximation)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = max(0, int(len(values) / 2 - half)), min(len(values) - 1, int(len(values) / 2 + half))
    return f"[{ordered[low]:.3f}, {ordered[high]:.3f}]"


def drop(model: Path) -> None:
    descriptor = os.open(model, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def bare(plan: dict[str, Any], path: Path) -> float:
    path.unlink(missing_ok=True)
    argv = [part.replace("{socket}", str(path)) for part in plan["argv"]]

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    began = time.monotonic()
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(argv, env=plan["env"], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    try:
        return first_answer(connect, child) - began
    finally:
        child.kill()  # with the protocol of a router's child, llama-server ends only with its standard input
        child.wait()


def under_edgellm(arguments: list[str], state: Path, port: int) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-m", "edge", "up", *arguments, "--state-dir", str(state)]
    command += ["--listen", f"127.0.0.1:{port}"]
    env = environment({"EDGELLM_GATEWAY__HOLD__SECONDS": "300"})
    starts = state / "state/main/starts.jsonl"
    known = len(starts.read_text().splitlines()) if starts.exists() else 0
    began = time.monotonic()
    with (state / "log").open("wb") as log:
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        took = first_answer(lambda: socket.create_connection(("127.0.0.1", port)), child) - began
        while not (state / "state/main/launch.json").exists() or len(starts.read_text().splitlines()) == known:
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        child.terminate()
        child.wait()
    record: dict[str, Any] = json.loads(starts.read_text().splitlines()[-1])
    return took, record


def first_answer(connect: Callable[[], socket.socket], child: subprocess.Popen[bytes]) -> float:
    """Ask every 2 ms until a completion comes back; return the moment."""
    while True:
        assert child.poll() is None, "it ended"
        connection = http.client.HTTPConnection("localhost", timeout=300)
        try:
            connection.sock = connect()
            connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                return time.monotonic()
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.002)


if __name__ == "__main__":
    main()
