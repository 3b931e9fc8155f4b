"""What telemetry costs, on this machine: `python -m tests.bench.telemetry [--seconds N] [--json]`

An idle `edgellm up` on a fake AGX Orin with the real jtop service (root). CPU is time of the process, so a busy machine
changes it little; latencies it does change. Exit code 1 where a limit of the table is exceeded.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from edge.models.pull import pull
from edge.telemetry.sysfs import SysfsSource
from tests.bench.rows import Row, bench_parser, report
from tests.conftest import CACHE
from tests.fakes.fake_jetson.client import jtop_python
from tests.fakes.fake_jetson.service import JtopService, only_one
from tests.fakes.fake_jetson.tree import FakeBoard, fake_board
from tests.serving import DEMO, Up, eventually
from tests.telemetry.test_telemetry_top import terminal
from tests.telemetry.test_telemetry_up import jtop_state, readers, up_on

CALM_AFTER_S = 15  # without readers jtop is polled every 5 s


def measure(seconds: float) -> Iterator[Row]:
    model = Path(pull(DEMO, CACHE / "models").path)
    with only_one(), fake_board() as board, tempfile.TemporaryDirectory(prefix="e-", dir="/tmp") as state:
        yield one_read(board)
        service = JtopService(board, jtop_python("7.2.2")).start()
        try:
            with up_on(board, Path(state), model, dwell_s=1.0) as up:
                eventually(lambda: jtop_state(up)["state"] == "ok", "jtop answers")
                time.sleep(CALM_AFTER_S)
                yield from idle(up, seconds)
                yield from watched(up, seconds)
                yield from latency(up, "/healthz while jtop answers", None)
                service.freeze()
                time.sleep(2)
                yield from latency(up, "/healthz while jtop is frozen", 50.0)
                service.thaw()
                service.kill()
                yield Row("oldest sample on /healthz in 10 s after jtop's death", oldest(up, 10.0), "s", 3.0)
        finally:
            service.thaw()
            service.stop()


def one_read(board: FakeBoard) -> Row:
    source = SysfsSource(board.root)
    source.read(0.0)
    began = time.process_time()
    for number in range(200):
        source.read(float(number))
    return Row("CPU of one reading of sysfs", (time.process_time() - began) / 200 * 1000, "ms")


def idle(up: Up, seconds: float) -> Iterator[Row]:
    parts = {"edgellm": psutil.Process(up.process.pid), "jtop reader": readers(up)[0]}
    before = {name: cpu_s(process) for name, process in parts.items()}
    began, age_s = time.monotonic(), oldest(up, seconds, every_s=1.0)
    took = time.monotonic() - began
    used = {name: (cpu_s(process) - before[name]) / took * 100 for name, process in parts.items()}
    yield Row(f"edgellm, idle for {took:.0f} s, of a core", used["edgellm"], "%", 0.8)
    yield Row("jtop reader, of a core", used["jtop reader"], "%")
    yield Row("jtop reader, resident", parts["jtop reader"].memory_info().rss / 1e6, "MB", 30.0)
    yield Row("oldest sample on /healthz", age_s, "s", 2.0)


def watched(up: Up, seconds: float) -> Iterator[Row]:
    """Two of `edgellm top`, each on a terminal of its own: theirs, and the server's meanwhile."""
    command = (sys.executable, "-m", "edge", "top", "--state-dir", str(up.state))
    with terminal(*command) as (first, ours, _), terminal(*command) as (second, other, _):
        for screen in (ours, other):
            threading.Thread(target=drain, args=(screen,), daemon=True).start()
        time.sleep(5)  # imports, and the first frame
        parts = {"edgellm top": psutil.Process(first.pid), "another": psutil.Process(second.pid)}
        parts["edgellm beside two of `top`"] = psutil.Process(up.process.pid)
        before, began = {name: cpu_s(process) for name, process in parts.items()}, time.monotonic()
        time.sleep(seconds)
        for name, process in parts.items():
            used = (cpu_s(process) - before[name]) / (time.monotonic() - began) * 100
            yield Row(f"{name}, of a core", used, "%", 1.0)


def drain(screen: int) -> None:
    while True:
        try:
            os.read(screen, 65536)
        except OSError:
            return  # closed


def latency(up: Up, what: str, limit_ms: float | None) -> Iterator[Row]:
    with httpx.Client() as client:
        times = sorted(client.get(f"{up.url}/healthz", timeout=30).elapsed.total_seconds() * 1000 for _ in range(200))
    yield Row(f"{what}, median", statistics.median(times), "ms")
    yield Row(f"{what}, p99", times[int(0.99 * len(times))], "ms", limit_ms)


def oldest(up: Up, seconds: float, every_s: float = 0.1) -> float:
    ages: list[float] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        ages.append(up.healthz()["telemetry"]["age_s"])
        time.sleep(every_s)
    return max(ages)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="that it is watched idle")
    arguments = parser.parse_args()
    return report(list(measure(arguments.seconds)), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
