"""Measure engine threads against wait policies and other load on the same cores.

    python tests/bench/cpu_threads.py MODEL.gguf [--cores 2] [--tokens 64] [--repeat 5] [--engine ID|PATH]

The engine is confined to the first `--cores` CPUs; beside it run 0, half as many, or as many busy loops. OpenMP builds
(the embedded engine) obey GOMP_SPINCOUNT and OMP_WAIT_POLICY: a barrier spins, and a spinning thread takes the core of
the one that it waits for. Prints the median seconds for the tokens, by threads, policy and load.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edge.bench.load import health  # a script: the checkout has to be found first
from edge.builder.smoke import request
from tests.bench.engine_ready import chosen
from tests.bench.rows import engine_parser, up_arguments

POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "spin 100": {"GOMP_SPINCOUNT": "100"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "spin 100000": {"GOMP_SPINCOUNT": "100000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
BUSY = "while True: pass"


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="e-"))
    cores = set(range(options.cores))
    print(f"seconds for {options.tokens} tokens on {options.cores} cores, medians of {options.repeat}")
    loads = sorted({0, options.cores // 2, options.cores})
    print(f"{'threads':>7}  {'policy':12}" + "".join(f"{f'{load} busy':>10}" for load in loads), flush=True)
    try:
        for threads in sorted({1, max(1, options.cores // 2), options.cores}):
            options.threads = threads
            plan = chosen(up_arguments(options), state)
            for policy, variables in POLICIES.items() if threads > 1 else [("default", {})]:
                row = [measure(plan, variables, cores, load, options, state / "s.sock") for load in loads]
                print(f"{threads:7}  {policy:12}" + "".join(f"{value:10.2f}" for value in row), flush=True)
    finally:
        shutil.rmtree(state, ignore_errors=True)


def measure(
    plan: dict[str, Any], variables: dict[str, str], cores: set[int], load: int, options: Any, path: Path
) -> float:
    path.unlink(missing_ok=True)
    argv = [str(path) if part == "{socket}" else part for part in plan["argv"]]
    quiet = subprocess.DEVNULL
    engine = subprocess.Popen(
        argv,
        env=plan["env"] | variables,
        stdin=subprocess.PIPE,
        stdout=quiet,
        stderr=quiet,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    others = []
    try:
        while health(path) != 200:
            assert engine.poll() is None, "the engine ended"
            time.sleep(0.01)
        others = [
            subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=lambda: os.sched_setaffinity(0, cores))
            for _ in range(load)
        ]
        time.sleep(0.3)
        return statistics.median(generate(path, options.tokens) for _ in range(options.repeat))
    finally:
        for process in (*others, engine):
            process.kill()
            process.wait()


def generate(path: Path, tokens: int) -> float:
    body = {"prompt": "Once upon a time", "n_predict": tokens, "temperature": 0, "ignore_eos": True}
    began = time.monotonic()
    status, answer = request(path, "POST", "/completion", json.dumps(body), timeout_s=300)
    assert status == 200, answer
    return time.monotonic() - began


if __name__ == "__main__":
    main()
