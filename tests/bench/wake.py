"""A request that wakes a sleeping model, against the warm start of the same engine by hand, in turns.

    python -m tests.bench.wake MODEL.gguf [--pairs 10] [--profile cpu] [--engine ID|PATH] [--threads N]

Both are counted to the answer of a chat completion of one token: by hand from the spawn of the engine with the plan's
own command line, asked every 2 ms; under edgellm from the request to the public address, which finds the model asleep.
A wake may take 100 ms more.
"""

from __future__ import annotations

import argparse
import http.client
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.engine_ready import chosen
from tests.bench.first_answer import BODY, bare
from tests.bench.rows import Row, report
from tests.serving import Up, edgellm, eventually

MOST_MORE_S = 0.1


def main() -> int:
    options = parse()
    state = Path(tempfile.mkdtemp(prefix="e-"))
    arguments = ["-p", options.profile, "-m", f"demo={options.model}"]
    arguments += ["--engine", options.engine] if options.engine else []
    arguments += ["--set", f"n_threads={options.threads}"]
    started, woken = [], []
    try:
        plan = chosen(arguments, state)
        with Up(state, *arguments) as up:
            up.wait_for("ok")
            for number in range(options.pairs + 1):
                started_s = bare(plan, state / "bare.sock") if unload(up) else 0.0
                woken_s = wake(up)
                if number:  # the first pair warms the page cache
                    started.append(started_s)
                    woken.append(woken_s)
    finally:
        shutil.rmtree(state, ignore_errors=True)
    more = [ours - theirs for ours, theirs in zip(woken, started, strict=True)]
    rows = [
        Row(f"by hand, warm, median of {options.pairs}", statistics.median(started), "s"),
        Row("woken by a request", statistics.median(woken), "s"),
        Row("median of the differences", statistics.median(more) * 1e3, "ms", MOST_MORE_S * 1e3),
    ]
    return report(rows, as_json=options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def unload(up: Up) -> bool:
    """Put the model to sleep, and wait until its engine is gone."""
    done = edgellm("unload", "demo", "--state-dir", str(up.state))
    assert done.returncode == 0, done.stderr
    return bool(eventually(lambda: up.status()["models"]["demo"]["state"] == "SLEEPING", "it sleeps"))


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
