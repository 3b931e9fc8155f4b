#!/usr/bin/env python3
"""llama.cpp's own server tests, bare and through the gateway, and what differs.

    python -m tests.suite.run --llama-server PATH --smollm2 FILE [--cache DIR] [--only FILE] [--bare DIR]

Writes result.json beside the runs (and tests/suite/result.json with --record). Exit code 1 where something differs
that tests/suite/reviewed.toml does not name. Alone on two cores about four minutes a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from edge.resources import load_toml
from tests.serving import eventually
from tests.suite import compare
from tests.suite.prepare import HERE, Layout, only_run, prepare, unused_port

SERVER_PORT = 8480
CANCEL = "unit/test_completion.py::test_cancel_request"


@dataclass(frozen=True)
class Result:
    at: str
    required: int
    bare_passed: int
    gateway_passed: int
    same_traces: int
    reviewed: dict[str, int]
    surprises: list[str]
    cancel_with_smollm2: str
    bare_s: float
    gateway_s: float


@contextlib.contextmanager
def hub(layout: Layout, folder: Path) -> Iterator[None]:
    child = subprocess.Popen([sys.executable, HERE / "hub.py", folder, str(layout.hub_port)])

    def answers() -> bool:
        assert child.poll() is None, f"the hub ended: is port {layout.hub_port} taken?"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", layout.hub_port), timeout=5):
            return True
        return False

    try:
        eventually(answers, "the hub does not answer")
        yield
    finally:
        child.terminate()
        child.wait()


def suite(layout: Layout, server: Path, out: Path, only: Path, environment: dict[str, str]) -> float:
    """One run; seconds. `server` is what the tests start."""
    out.mkdir(parents=True, exist_ok=True)
    for former in ("junit.xml", "trace.jsonl"):  # a run that does not begin must not be judged by the one before
        (out / former).unlink(missing_ok=True)
    cache = out / layout.key / "llama-cache"  # compare.py masks the last name
    # Options of our own pytest are unknown to the suite's.
    plain = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and key != "PYTEST_ADDOPTS"}
    settings = {
        "LLAMA_SERVER_BIN_PATH": str(server),
        "LLAMA_CACHE": str(cache),
        "MODEL_ENDPOINT": f"http://127.0.0.1:{layout.hub_port}/",
        "HF_ENDPOINT": f"http://127.0.0.1:{layout.hub_port}",
        "PORT": str(unused_port(SERVER_PORT)),
        "LLAMA_ARG_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(HERE),
        "TRACE": str(out / "trace.jsonl"),
        "ONLY": str(only),
    }
    command = [
        layout.python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "plugin", "-m", "not slow", "--timeout=180",
        f"--junitxml={out / 'junit.xml'}", "--tb=short", "-q",
    ]  # fmt: skip
    began = time.monotonic()
    with (out / "log.txt").open("w") as log:
        subprocess.run(
            command, cwd=layout.tests, env=plain | settings | environment, stdout=log, stderr=log, check=False
        )
    return round(time.monotonic() - began, 1)


def cancel_test(layout: Layout, out: Path, shim: dict[str, str]) -> str:
    """With the larger model: the tiny one is done before anybody could notice that its client left."""
    only = out / "cancel.txt"
    only.parent.mkdir(parents=True, exist_ok=True)
    only.write_text(CANCEL + "\n")
    with hub(layout, layout.smollm2_hub):
        suite(layout, HERE / "shim.py", out / "cancel", only, shim | {"SKIP_LOAD_ALL": "1"})
    return compare.outcomes((out / "cancel" / "junit.xml").read_text()).get(CANCEL, "not run")


def run(layout: Layout, llama_server: Path, out: Path, only: Path, bare: Path | None) -> Result:
    shim = {"LLAMA_SERVER": str(llama_server), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with hub(layout, layout.hub):
        bare_s = 0.0
        if bare is None:
            bare = out / "bare"
            bare_s = suite(layout, llama_server, bare, only, {})
        gateway_s = suite(layout, HERE / "shim.py", out / "gateway", only, shim)
    outcomes = [compare.outcomes((folder / "junit.xml").read_text()) for folder in (bare, out / "gateway")]
    traces = [compare.trace((folder / "trace.jsonl").read_text()) for folder in (bare, out / "gateway")]
    differs = compare.different(*traces)
    known = compare.reviewed(load_toml(HERE / "reviewed.toml"))
    surprises, met = compare.judge(*outcomes, differs, known)
    return Result(
        at=datetime.now(timezone.utc).date().isoformat(),
        required=len(only.read_text().splitlines()),
        bare_passed=sum(outcome == "pass" for outcome in outcomes[0].values()),
        gateway_passed=sum(outcome == "pass" for outcome in outcomes[1].values()),
        same_traces=len(traces[0]) - len(differs),
        reviewed=dict(met),
        surprises=surprises,
        cancel_with_smollm2=cancel_test(layout, out, shim),
        bare_s=bare_s,
        gateway_s=gateway_s,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "edgellm-tests")
    parser.add_argument("--only", type=Path, default=HERE / "required.txt", help="test ids, one a line")
    parser.add_argument("--bare", type=Path, help="a former bare run to compare with")
    parser.add_argument("--record", action="store_true", help="keep the result in tests/suite/result.json")
    arguments = parser.parse_args()
    out = arguments.cache / "llama-suite" / "out"
    with only_run(arguments.cache):
        layout = prepare(arguments.cache, arguments.smollm2.resolve())
        result = run(layout, arguments.llama_server.resolve(), out, arguments.only.resolve(), arguments.bare)
    text = json.dumps(asdict(result), indent=2)
    (out / "result.json").write_text(text + "\n")
    if arguments.record:
        (HERE / "result.json").write_text(text + "\n")
    print(text)
    return 1 if result.surprises or result.cancel_with_smollm2 != "pass" else 0


if __name__ == "__main__":
    sys.exit(main())
