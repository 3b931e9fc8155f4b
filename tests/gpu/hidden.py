"""The GPU is hidden: refused or degraded as the profile says, never silently the CPU. python -m tests.gpu.hidden

ENGINE and MODEL as tests/gpu/run.sh sets them. An engine that loses the GPU after the plan (FC-74) is tested with real
processes in tests/supervisor.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.serving import Up, edgellm, free_port

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
# All cores: one thread takes a minute for the first tokens of a model made for a GPU.
SMALL = ("--set", "n_ctx=2048", "--set", "n_ctx_min=512", "--set", f"n_threads={os.cpu_count()}")


def refused(engine: str, model: str, state: Path) -> str:
    arguments = ("-p", "cuda", "-m", model, "--engine", engine, "--state-dir", str(state))
    done = edgellm("up", *arguments, "--listen", f"127.0.0.1:{free_port()}", env=HIDDEN)
    assert done.returncode != 0 and "hint:" in done.stderr, (done.returncode, done.stdout, done.stderr)
    return f"exit {done.returncode}: {done.stderr.splitlines()[0]}"


def degraded(engine: str, model: str, state: Path) -> str:
    options = ("-p", "cuda", "-m", f"m={model}", "--engine", engine, "--set", "fallback=cpu", *SMALL)
    with Up(state, *options, env=HIDDEN) as up:
        document = up.wait_for("ok", "degraded")
        assert document["status"] == "degraded", document
        return json.dumps(document["models"]["m"]["degraded"])


def main() -> int:
    engine, model = os.environ["ENGINE"], os.environ["MODEL"]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="e-") as folder:
        cases: tuple[Callable[[str, str, Path], str], ...] = (refused, degraded)
        for case in cases:
            try:
                print(f"hidden GPU, {case.__name__}: {case(engine, model, Path(folder) / case.__name__)}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"hidden GPU, {case.__name__}: NOT AS EXPECTED: {error}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
