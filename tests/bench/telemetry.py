"""What telemetry costs, on this machine: python -m tests.bench.telemetry [SECONDS]

An idle `edgellm up` on a fake AGX Orin with the real jtop service (root). CPU is time of the process, so a busy machine
changes it little; latencies it does change.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from edge.model.pull import pull
from edge.telemetry.sysfs import SysfsSource
from tests.conftest import CACHE
from tests.fakes.fake_jetson.client import jtop_python
from tests.fakes.fake_jetson.service import JtopService, only_one
from tests.fakes.fake_jetson.tree import FakeBoard, fake_board
from tests.serving import DEMO, Up, eventually
from tests.telemetry.test_telemetry_up import jtop_state, readers, up_on


def main(seconds: float) -> None:
    model = Path(pull(DEMO, CACHE / "models").path)
    with only_one(), fake_board() as board, tempfile.TemporaryDirectory(prefix="e-", dir="/tmp") as state:
        one_read(board)
        service = JtopService(board, jtop_python("7.2.2")).start()
        try:
            with up_on(board, Path(state), model, dwell_s=1.0) as up:
                eventually(lambda: jtop_state(up)["state"] == "ok", "jtop answers")
                time.sleep(15)  # nobody watches any more: jtop every 5 s
                idle(up, seconds)
                latency(up, "/healthz while jtop answers", 200)
                service.freeze()
                time.sleep(2)
                latency(up, "/healthz while jtop is frozen", 200)
                service.thaw()
                service.kill()
                oldest = max(age(up) for _ in range(100))
                print(f"oldest sample on /healthz in 10 s after jtop's death: {oldest:.2f} s (< 3)")
        finally:
            service.thaw()
            service.stop()


def one_read(board: FakeBoard) -> None:
    source = SysfsSource(board.root)
    source.read(0.0)
    began = time.process_time()
    for number in range(200):
        source.read(float(number))
    print(f"one reading of sysfs: {(time.process_time() - began) / 200 * 1000:.2f} ms CPU")


def idle(up: Up, seconds: float) -> None:
    parts = {"edgellm": psutil.Process(up.process.pid), "jtop reader": readers(up)[0]}
    before = {name: cpu_s(process) for name, process in parts.items()}
    began, ages = time.monotonic(), []
    while time.monotonic() - began < seconds:
        ages.append(age(up))
        time.sleep(1)
    took = time.monotonic() - began
    for name, process in parts.items():
        used = cpu_s(process) - before[name]
        rows = dict(line.split(":") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        total, own = (int(rows[key].split()[0]) / 1024 for key in ("VmRSS", "RssAnon"))
        print(f"{name}: {used / took:.2%} of a core over {took:.0f} s, RSS {total:.0f} MiB, anonymous {own:.0f} MiB")
    print(f"oldest sample on /healthz: {max(ages):.2f} s (< 2)")


def latency(up: Up, what: str, count: int) -> None:
    with httpx.Client() as client:
        times = sorted(client.get(f"{up.url}/healthz", timeout=30).elapsed.total_seconds() * 1000 for _ in range(count))
    p99 = times[int(0.99 * count)]
    print(f"{what}: median {statistics.median(times):.1f} ms, p99 {p99:.1f} ms, worst {times[-1]:.1f} ms (< 50)")


def age(up: Up) -> float:
    time.sleep(0.1)
    value: float = up.healthz()["telemetry"]["age_s"]
    return value


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
