"""A request that wakes a sleeping model, against the warm start of the same engine by hand, in turns.

    python -m tests.bench.wake MODEL.gguf [--pairs 10] [--profile cpu] [--engine ID|PATH] [--threads N]

Both are counted to the answer of a chat completion of one token: by hand from the spawn of the engine with the plan's
own command line, asked every 2 ms; under edgellm from the request to the public address, which finds the model asleep.
A wake may take 100 ms more. The last rows are of the engine's own sleep (--sleep-idle-seconds), which keeps the process
and frees the model: what it leaves in memory, where edgellm's sleep leaves nothing, and how long it takes to wake.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from edge.builder.smoke import request
from edge.linux.procfs import read_usage
from tests.bench.engine_ready import chosen
from tests.bench.first_answer import BODY, bare, first_answer
from tests.bench.rows import Row, engine_parser, report, up_arguments
from tests.serving import Up, edgellm, eventually

MOST_MORE_S = 0.1


def main() -> int:
    parser = engine_parser(__doc__, threads=1, reports=True)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    state, arguments = Path(tempfile.mkdtemp(prefix="e-")), up_arguments(options)
    started, woken, engines, left = [], [], [], 0
    try:
        plan = chosen(arguments, state)
        with Up(state, *arguments) as up:
            up.wait_for("ok")
            for number in range(options.pairs + 1):
                started_s = bare(plan, state / "bare.sock") if unload(up) else 0.0
                woken_s = wake(up)
                engines_s, left = engines_own(plan, state / "own.sock")
                if number:  # the first pair warms the page cache
                    started.append(started_s)
                    woken.append(woken_s)
                    engines.append(engines_s)
    finally:
        shutil.rmtree(state, ignore_errors=True)
    more = [ours - theirs for ours, theirs in zip(woken, started, strict=True)]
    rows = [
        Row(f"by hand, warm, median of {options.pairs}", statistics.median(started), "s"),
        Row("woken by a request", statistics.median(woken), "s"),
        Row("median of the differences", statistics.median(more) * 1e3, "ms", MOST_MORE_S * 1e3),
        Row("woken from the engine's own sleep", statistics.median(engines), "s"),
        Row("left in memory by that (RSS)", left / 1e6, "MB"),
    ]
    return report(rows, as_json=options.json)


def unload(up: Up) -> bool:
    """Put the model to sleep, and wait until its engine is gone."""
    done = edgellm("unload", "demo", "--state-dir", str(up.state))
    assert done.returncode == 0, done.stderr
    return bool(eventually(lambda: up.status()["models"]["demo"]["state"] == "SLEEPING", "it sleeps"))


def engines_own(plan: dict[str, Any], path: Path) -> tuple[float, int]:
    """Let the engine itself sleep after a second; return the seconds of its wake and its memory before that."""
    path.unlink(missing_ok=True)
    argv = [str(path) if part == "{socket}" else part for part in plan["argv"]]
    if "--params" in argv:
        place = argv.index("--params") + 1
        argv[place] = json.dumps(json.loads(argv[place]) | {"sleep_idle_seconds": 1})
    else:
        argv += ["--sleep-idle-seconds", "1"]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(argv, env=plan["env"], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    try:
        first_answer(connect, child)
        eventually(lambda: json.loads(request(path, "GET", "/props")[1]).get("is_sleeping"), "it sleeps")
        usage = read_usage(child.pid)
        began_s = time.monotonic()
        return first_answer(connect, child) - began_s, usage.rss_bytes if usage else 0
    finally:
        child.terminate()
        child.wait()


def wake(up: Up) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=300)
    began_s = time.monotonic()
    connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    took_s = time.monotonic() - began_s
    connection.close()
    assert answer.status == 200, answer.status
    return took_s


if __name__ == "__main__":
    sys.exit(main())
