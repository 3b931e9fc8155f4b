"""How long the engine takes under edgellm against the same engine started by hand, in pairs.

    python tests/bench/engine_ready.py MODEL.gguf [--pairs 20] [--cold] [--profile cpu] [--engine ID|PATH]

Both are counted from the child's spawn to /health 200. By hand means: the plan's own command line and environment,
and a client that polls /health every 2 ms. Also prints the launcher's CPU time until the spawn. `--cold` drops the
model's pages before each start, and prints the limit that edgellm states for it: the bytes at the disk's best rate,
and what the engine needs beside reading.
"""

from __future__ import annotations

import compileall
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edge.bench.load import health  # a script: the checkout has to be found first
from edge.linux.procfs import drop_pages
from edge.supervisor.process import SLOT_FOLDER
from edge.units import GIB
from tests.bench.rows import command_at, engine_parser, state_of, up_arguments
from tests.serving import ROOT, Up, edgellm, eventually


def main() -> None:
    parser = engine_parser(__doc__, threads=1)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    state, arguments = state_of(options), up_arguments(options)
    try:
        plan = command_at(chosen(arguments, state), cold=options.cold)
        rows, limits = [], []
        for number in range(options.pairs + 1):
            cold = options.cold and number > 0
            by_hand_s = by_hand(plan, state / "hand.sock", options.model if cold else None)
            record = under_edgellm(arguments, state, options.model if cold else None)
            ready_s = record["engine_ready_s"] - record["spawn_s"]
            if number:  # the first pair warms the page cache
                rows.append((by_hand_s, ready_s, record["spawn_cpu_s"], record["ready_s"]))
                limits.append(record["limit"])
                print(f"{number:3} by hand {by_hand_s:.3f} s, edgellm {ready_s:.3f} s, spawn CPU {rows[-1][2]:.3f} s")
    finally:
        shutil.rmtree(state, ignore_errors=True)
    hand, ours, cpu, ready = (statistics.median(column) for column in zip(*rows, strict=True))
    difference = statistics.median(row[1] - row[0] for row in rows)
    print(f"medians of {len(rows)} pairs: by hand {hand:.3f} s, edgellm {ours:.3f} s")
    print(f"median of the differences {difference * 1e3:+.0f} ms")
    if options.cold:
        limit_s = statistics.median(limit["total_s"] for limit in limits)
        fixed_s = statistics.median(limit["fixed_s"] for limit in limits)
        ratios = [
            statistics.median(row[at] / limit["total_s"] for row, limit in zip(rows, limits, strict=True))
            for at in (0, 1)
        ]
        rates = ", ".join(f"{limit['rate'] / GIB:.2f}" for limit in limits)
        print(f"limit {limit_s:.3f} s, {fixed_s:.3f} s of them beside reading; GiB/s of direct reads: {rates}")
        print(f"of the limit: by hand {ratios[0]:.3f}, edgellm {ratios[1]:.3f}")
    print(f"spawn after {cpu * 1e3:.0f} ms of CPU, READY {ready:.3f} s after the process began")


def chosen(arguments: list[str], state: Path) -> dict[str, Any]:
    """Return the chosen rung of the plan, with bytecode compiled as an installation has it (80 ms of a start)."""
    compileall.compile_dir(ROOT / "edge", quiet=2)
    done = edgellm("plan", *arguments, "--state-dir", str(state), "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"].values()
    rung: dict[str, Any] = model["ladder"][model["chosen"]]
    if SLOT_FOLDER in rung["argv"]:  # llama-server ends without it; edgellm makes it before each spawn
        Path(rung["argv"][rung["argv"].index(SLOT_FOLDER) + 1]).mkdir(parents=True, exist_ok=True)
    return rung


def by_hand(plan: dict[str, Any], path: Path, dropped: Path | None) -> float:
    """Return the seconds of a start by hand; the pages of the file `dropped` leave the page cache first."""
    path.unlink(missing_ok=True)
    if dropped is not None:
        drop_pages(dropped)
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
        child.kill()  # with the protocol of a router's child, llama-server ends only with its standard input
        child.wait()


def under_edgellm(arguments: list[str], state: Path, dropped: Path | None) -> dict[str, Any]:
    """Return the record of a start that planned, with its limit if pages of a file were dropped for it."""
    (state / "state/main/launch.json").unlink(missing_ok=True)
    if dropped is not None:
        drop_pages(dropped)
    known = len(starts(state))

    def last() -> dict[str, Any] | None:
        rows = starts(state)
        return rows[-1] if len(rows) > known and (dropped is None or rows[-1]["limit"]["rate"]) else None

    with Up(state, *arguments) as up:
        up.wait_for("ok", "degraded")
        record: dict[str, Any] = eventually(last, "the start is not recorded")
    return record


def starts(state: Path) -> list[dict[str, Any]]:
    """Return the records of all starts; they are written a moment after READY."""
    path = state / "state/main/starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
