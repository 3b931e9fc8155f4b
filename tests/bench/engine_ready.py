"""How long the engine takes under edgellm against the same engine started by hand, in pairs.

    python tests/bench/engine_ready.py MODEL.gguf [--pairs 20] [--profile cpu] [--engine ID|PATH]

Both are counted from the child's spawn to /health 200. By hand means: the plan's own command line and environment,
and a client that polls /health every 2 ms. Also prints the launcher's CPU time until the spawn.
"""

from __future__ import annotations

import compileall
import json
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
from tests.bench.rows import engine_parser, up_arguments
from tests.serving import ROOT, Up, edgellm


def main() -> None:
    parser = engine_parser(__doc__, threads=1)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    state, arguments = Path(tempfile.mkdtemp(prefix="e-")), up_arguments(options)
    try:
        plan = chosen(arguments, state)
        rows = []
        for number in range(options.pairs + 1):
            by_hand_s = by_hand(plan, state / "hand.sock")
            record = under_edgellm(arguments, state)
            ready_s = record["engine_ready_s"] - record["spawn_s"]
            if number:  # the first pair warms the page cache
                rows.append((by_hand_s, ready_s, record["spawn_cpu_s"], record["ready_s"]))
                print(f"{number:3} by hand {by_hand_s:.3f} s, edgellm {ready_s:.3f} s, spawn CPU {rows[-1][2]:.3f} s")
    finally:
        shutil.rmtree(state, ignore_errors=True)
    hand, ours, cpu, ready = (statistics.median(column) for column in zip(*rows, strict=True))
    difference = statistics.median(row[1] - row[0] for row in rows)
    print(f"medians of {len(rows)} pairs: by hand {hand:.3f} s, edgellm {ours:.3f} s")
    print(f"median of the differences {difference * 1e3:+.0f} ms")
    print(f"spawn after {cpu * 1e3:.0f} ms of CPU, READY {ready:.3f} s after the process began")


def chosen(arguments: list[str], state: Path) -> dict[str, Any]:
    """Return the chosen rung of the plan, with bytecode compiled as an installation has it (80 ms of a start)."""
    compileall.compile_dir(ROOT / "edge", quiet=2)
    done = edgellm("plan", *arguments, "--state-dir", str(state), "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"].values()
    rung: dict[str, Any] = model["ladder"][model["chosen"]]
    return rung


def by_hand(plan: dict[str, Any], path: Path) -> float:
    path.unlink(missing_ok=True)
    argv = [str(path) if part == "{socket}" else part for part in plan["argv"]]
    began = time.monotonic()
    child = subprocess.Popen(
        argv, env=plan["env"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while health(path) != 200:
            assert child.poll() is None, "the engine ended"
            time.sleep(0.002)
        return time.monotonic() - began
    finally:
        child.terminate()
        child.wait()


def under_edgellm(arguments: list[str], state: Path) -> dict[str, Any]:
    shutil.rmtree(state / "state", ignore_errors=True)
    with Up(state, *arguments) as up:
        up.wait_for("ok", "degraded")
    record: dict[str, Any] = json.loads((state / "state/main/starts.jsonl").read_text().splitlines()[-1])
    return record


if __name__ == "__main__":
    main()
