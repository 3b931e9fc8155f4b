"""The commands of the blocks marked `bench` and `long`: those that take seconds in a short form are run in that form.

This table is the only place that says which are not run, and why. No figure of a short run is judged.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs_blocks import measured
from tests.serving import PATIENCE_S, ROOT, environment

# By command of the pages: the arguments of its short form, and a word of its report.
SHORT = {
    "python tests/bench/engine_ready.py MODEL --pairs 20": ("MODEL --pairs 1", "median of the differences"),
    "python tests/bench/first_answer.py MODEL.gguf --threads 4 --cold": ("MODEL --threads 1 --pairs 1", "remembered"),
    "python -m tests.bench.saved_prompts MODEL --rounds 2 --threads 1": (
        "MODEL --rounds 1 --threads 1 --tokens 200",
        "restored of computed",
    ),
    "python -m tests.bench.kills --rounds 1000": ("--rounds 3", "orphans"),
    "python -m tests.bench.soak --minutes 30": ("--minutes 0.05", "answers"),
    "python -m tests.bench.gateway": ("--rounds 1 --requests 50", "added per request"),
    "python -m tests.bench.governor": ("--hours 0.05", "max_watts"),
    "python -m tests.bench.memory": ("--only llama-wide", "within the limits"),
}
MINUTES = "its shortest form takes a minute or more"
BUILT = "the real build runs in tests/builder"
NOT_RUN = {
    "make setup": "runs before this test",
    "make check": "runs before this test",
    "make test": "runs before this test",
    "make test-full": "runs this test",
    "edgellm build": BUILT,
    "edgellm build --recipe cuda --arch 90": "needs the CUDA toolkit",
    "edgellm build --source git:TAG": "fetches from a host that CI does not reach",
    "edgellm build --fetch-tools": BUILT,
    "edgellm build -p cpu": BUILT,
    "edgellm build --rpc": BUILT,
    "cmake --build BUILD --target llama-fit-params": "a target of llama.cpp's",
    "edgellm bench load --apply": "tests/bench/test_bench_command.py runs it",
    "edgellm timeline": "tests/cli and tests/daemon run it",
    "python tests/bench/peers.py MODEL.gguf --engine PATH/llama-server --turns 20 --threads 1": MINUTES,
    "python -m tests.bench.wake MODEL --pairs 5": MINUTES,
    "python tests/bench/cpu_threads.py MODEL.gguf --cores 2": MINUTES,
    "python -m tests.bench.pool_swap LLAMA_SERVER MODEL.gguf --turns 12": MINUTES,
    "python -m tests.bench.pool MODEL.gguf": MINUTES,
    "python -m tests.bench.supervisor --rounds 100 --idle 30": MINUTES,
    "python -m tests.bench.floods --seconds 8": MINUTES,
    "python -m tests.bench.probes --seconds 12": "as root it mounts a driver that hangs",
    "python -m tests.bench.telemetry --seconds 30": "as root it mounts a fake board",
    "python -m tests.bench.memory --gpu --engine PATH": "needs a GPU",
    "python -m tests.bench.memory --engine PATH --fit-params BUILD/bin/llama-fit-params": MINUTES,
}


def test_each_command_of_the_pages_is_run_in_a_short_form_or_the_table_says_why_not() -> None:
    assert sorted([*SHORT, *NOT_RUN]) == sorted(measured())


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.parametrize("command", SHORT)
def test_a_bench_of_the_pages_reaches_its_report(command: str, smollm2: Path) -> None:
    """Exit code 1 is a limit that was missed, in seconds on a machine that does other things."""
    arguments, word = SHORT[command]
    words = shlex.split(command)
    program = words[1:3] if words[1] == "-m" else [words[1]]
    done = subprocess.run(
        [sys.executable, *program, *(str(smollm2) if each == "MODEL" else each for each in arguments.split())],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=5 * PATIENCE_S,
        check=False,
    )
    assert done.returncode in (0, 1) and word in done.stdout, f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
