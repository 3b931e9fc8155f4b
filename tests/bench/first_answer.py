"""Measure the first answer after a start, in interleaved turns: the bare engine, `up` that plans, `up` that remembers.

    python tests/bench/first_answer.py MODEL.gguf [--pairs 20] [--cold] [--profile cpu] [--engine ID|PATH] [--threads N]

Each turn counts from exec to the answer of a chat completion of one token. The bare engine gets the plan's own command
line and environment, and is asked every 2 ms; a llama-server also takes a turn with its own defaults. `--cold` drops
the model's pages from the page cache before each start. `--seconds` ends the turns early.

Made for machines that do other work too: the order of the ways changes from turn to turn, CPU time up to the answer
stands beside wall time (of the launcher, of the engine), and the pairs are also given for that half of the turns in
which other processes took the least, which is chosen before any result is looked at. Prints medians with 95 %
intervals (order statistics), and the launcher's CPU time until the spawn.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from edge.daemon.remembered_launch import next_start  # a script: the checkout has to be found first
from edge.linux.procfs import drop_pages, family_pids
from edge.paths import folders
from tests.bench.engine_ready import chosen, starts
from tests.bench.rows import command_at, engine_parser, state_of, up_arguments
from tests.serving import environment, free_port

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0})
BARE, DEFAULTS, PLANNED, REMEMBERED = "bare", "bare, defaults", "up, planned", "up, remembered"
OURS = (PLANNED, REMEMBERED)


class Answer(NamedTuple):
    """The first answer of one start. CPU seconds up to it: of the launcher, of the engine, of all other processes."""

    took_s: float
    launcher_s: float
    engine_s: float
    others_s: float
    record: Mapping[str, Any] = MappingProxyType({})  # of the start, where edgellm kept one

    @property
    def others(self) -> float:
        """Return the cores that other processes used on average."""
        return self.others_s / self.took_s


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--no-plan", action="store_true", help="leave out the turns of `up` that plans")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no turn after so many seconds")
    parser.add_argument("--records", type=Path, metavar="FILE", help="keep all turns, with the records of their starts")
    options = parser.parse_args()
    # One command line for both ways of `up`: a remembered launch belongs to one.
    state, common = state_of(options), up_arguments(options)
    turns: list[dict[str, Answer]] = []
    port, end_s = free_port(), time.monotonic() + options.seconds
    try:
        plan = command_at(chosen(common, state), cold=options.cold)
        known = defaults(plan["argv"][0], options)
        ways = [BARE, *([DEFAULTS] if known else []), *([] if options.no_plan else [PLANNED]), REMEMBERED]
        for number in range(options.pairs + 1):
            turn: dict[str, Answer] = {}
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                if options.cold:
                    drop_pages(options.model)
                if way in OURS:
                    turn[way] = up(way, common, state, port)
                else:
                    turn[way] = bare_answer(plan if way == BARE else plan | known, state / "bare.sock")
            if not number:  # it warms caches and leaves the record to remember
                continue
            walls = ", ".join(f"{way} {answer.took_s:.3f} s" for way, answer in turn.items())
            print(f"{number:3} {walls}", file=sys.stderr, flush=True)
            assert PLANNED not in turn or not turn[PLANNED].record["remembered"]
            if turn[REMEMBERED].record["remembered"]:
                turns.append(turn)
            else:  # for example: the model's folder has new files, or a virtual machine got memory
                print(f"{number:3} is left out: {next_start(folders(os.environ, state))}", file=sys.stderr, flush=True)
            if time.monotonic() > end_s:
                break
    finally:
        shutil.rmtree(state, ignore_errors=True)
        if options.records is not None:
            options.records.write_text("".join(json.dumps(as_row(turn)) + "\n" for turn in turns))
    assert turns, "no start was a remembered one"
    report(turns)


def as_row(turn: Mapping[str, Answer]) -> dict[str, Any]:
    return {way: answer._asdict() | {"record": dict(answer.record)} for way, answer in turn.items()}


def defaults(program: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the command of llama-server with nothing but the model; {} where the engine is no llama-server."""
    if Path(program).name != "llama-server":
        return {}
    threads = ["-t", str(options.threads)] if options.threads else []
    argv = [program, "-m", str(options.model), "--host", "{socket}", *threads]
    return {"argv": argv, "env": dict(os.environ)}


def up(way: str, common: list[str], state: Path, port: int) -> Answer:
    if way == PLANNED:
        (state / "state/main/launch.json").unlink(missing_ok=True)
    return up_answer(common, state, port)


def report(turns: Sequence[dict[str, Answer]]) -> None:
    print("| | first answer | CPU of the launcher | CPU of the engine | CPU to the spawn |\n|---|---|---|---|---|")
    for way in (way for way in (BARE, DEFAULTS, *OURS) if way in turns[0]):
        answers = [turn[way] for turn in turns]
        wall = [answer.took_s for answer in answers]
        columns = [f"{statistics.median(wall):.3f} s {interval(wall)}"]
        columns += [milliseconds(answer.launcher_s for answer in answers) if way in OURS else ""]
        columns += [milliseconds(answer.engine_s for answer in answers)]
        columns += [milliseconds(answer.record["spawn_cpu_s"] for answer in answers) if way in OURS else ""]
        print(f"| {way} | {' | '.join(columns)} |")
    others = sorted(turns, key=lambda turn: sum(answer.others for answer in turn.values()))
    half = others[: max(1, len(others) // 2)]
    print(
        f"\n| more than bare, in pairs | all {len(turns)} turns | the {len(half)} with the least other load |",
        "|---|---|---|",
        sep="\n",
    )
    for way in (way for way in (DEFAULTS, *OURS) if way in turns[0]):
        print(f"| {way} | {difference(turns, way)} | {difference(half, way)} |")
    loads = [[answer.others for turn in some for answer in turn.values()] for some in (turns, half)]
    cells = " | ".join(f"{statistics.median(load):.1f} of {os.cpu_count()}" for load in loads)
    print(f"| cores that other processes used | {cells} |", flush=True)


def difference(turns: Sequence[dict[str, Answer]], way: str) -> str:
    values = [turn[way].took_s - turn[BARE].took_s for turn in turns]
    return f"{statistics.median(values) * 1e3:+.0f} ms {interval(values)} s"


def milliseconds(values: Iterable[float]) -> str:
    return f"{statistics.median(values) * 1e3:.0f} ms"


def interval(values: list[float]) -> str:
    """Return the 95 % interval of the median by order statistics (binomial, normal approximation)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = max(0, int(len(values) / 2 - half)), min(len(values) - 1, int(len(values) / 2 + half))
    return f"[{ordered[low]:.3f}, {ordered[high]:.3f}]"


def bare(plan: dict[str, Any], path: Path) -> float:
    return bare_answer(plan, path).took_s


def bare_answer(plan: dict[str, Any], path: Path) -> Answer:
    path.unlink(missing_ok=True)
    argv = [str(path) if part == "{socket}" else part for part in plan["argv"]]

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    busy_s = busy()
    began = time.monotonic()
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(argv, env=plan["env"], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    try:
        took_s = first_answer(connect, child) - began
        engine_s = cpu_s([child.pid])
        return Answer(took_s, 0.0, engine_s, max(0.0, busy() - busy_s - engine_s))
    finally:
        child.kill()  # with the protocol of a router's child, llama-server ends only with its standard input
        child.wait()


def under_edgellm(arguments: list[str], state: Path, port: int) -> tuple[float, Mapping[str, Any]]:
    answer = up_answer(arguments, state, port)
    return answer.took_s, answer.record


def up_answer(arguments: list[str], state: Path, port: int) -> Answer:
    command = [sys.executable, "-m", "edge", "up", *arguments, "--state-dir", str(state)]
    command += ["--listen", f"127.0.0.1:{port}"]
    env = environment({"EDGELLM_GATEWAY__HOLD__SECONDS": "300"})
    known = len(starts(state))
    busy_s = busy()
    began = time.monotonic()
    with (state / "log").open("wb") as log:
        child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        took_s = first_answer(lambda: socket.create_connection(("127.0.0.1", port)), child) - began
        launcher_s, engine_s = cpu_s([child.pid]), cpu_s(family_pids(child.pid)[1:])
        others_s = max(0.0, busy() - busy_s - launcher_s - engine_s)
        while not (state / "state/main/launch.json").exists() or len(starts(state)) == known:
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        child.terminate()
        child.wait()
    return Answer(took_s, launcher_s, engine_s, others_s, starts(state)[-1])


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds of living processes, with all their threads, to the nanosecond."""
    total = 0.0
    for pid in pids:
        # clock_getcpuclockid(3) in glibc: ~pid << 3 | CPUCLOCK_SCHED (2). A process that has just ended counts nothing.
        with contextlib.suppress(OSError):
            total += time.clock_gettime(~pid << 3 | 2)
    return total


def busy() -> float:
    """Return the CPU seconds of all processes since boot, and those that the hypervisor gave to others."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    idle = int(fields[3]) + int(fields[4])  # idle, iowait
    return (sum(map(int, fields)) - idle) / os.sysconf("SC_CLK_TCK")


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
