"""How soon `/livez` answers while something behind it does not: `python -m tests.bench.probes [--seconds N] [--json]`

Real processes: `edgellm up` with a libnvidia-ml.so.1 whose calls return when a file is gone, with a disk that answers
no open(2), and with an engine that prints as fast as its pipe takes it. Needs root (a mount namespace shows
/proc/driver/nvidia) and a C compiler. Exit code 1 where a limit of the table is exceeded.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from edge.models.pull import pull
from tests.bench.rows import Row, bench_parser, report
from tests.conftest import CACHE
from tests.fakes import llama_switches
from tests.serving import DEMO, Up, eventually

FAKE_NVML = Path(__file__).parents[1] / "board" / "fake_nvml.c"
HANGING_OPEN = Path(__file__).parents[1] / "fakes" / "hanging_open.c"
GPU = "NVIDIA H200,GPU-cc,00000000:01:00.0,150000000000,149000000000,9,0,0"
# Shows a driver's version, by which edgellm decides whether NVML is worth loading. Only this process tree sees it.
AS_DRIVER = """
mount -t tmpfs none /proc/driver && mkdir -p /proc/driver/nvidia && echo 580.65 >/proc/driver/nvidia/version || exit 1
exec "$@"
"""
LIMIT_MS = 50.0
PAUSE_S = 0.01


def measure(seconds: float) -> Iterator[Row]:
    model = Path(pull(DEMO, CACHE / "models").path)
    with tempfile.TemporaryDirectory(prefix="e-", dir="/tmp") as folder:
        yield from calm(Path(folder) / "calm", model, seconds)
        yield from hanging_driver(Path(folder) / "hang", model, seconds)
        yield from hung_disk(Path(folder) / "disk", model, seconds)
        yield from flooded_log(Path(folder) / "flood", model, seconds)


def calm(state: Path, model: Path, seconds: float) -> Iterator[Row]:
    with Up(state, "-p", "cpu", "-m", f"demo={model}", "--set", "n_ctx=2048") as up:
        up.wait_for("ok", "degraded")
        yield from latencies(up, "nothing hangs", seconds)


def hanging_driver(state: Path, model: Path, seconds: float) -> Iterator[Row]:
    """NVML hangs from the first call on: a profile with a GPU waits for it, and its probes answer."""
    state.mkdir(parents=True)
    library, hang = state / "libnvidia-ml.so.1", state / "hang"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, FAKE_NVML], check=True)
    hang.touch()
    env = {"LD_LIBRARY_PATH": str(state), "FAKE_NVML": GPU, "FAKE_NVML_HANG": str(hang)}
    began_s = time.monotonic()
    isolated = ("-c", f"import os, sys; os.execvp('unshare', {['unshare', '-m', 'sh', '-c', AS_DRIVER, 'sh']} + [")
    program = (isolated[0], isolated[1] + "sys.executable, '-m', 'edge', 'up', *sys.argv[1:]])")
    arguments = ("-m", f"demo={model}", "--set", "n_ctx=2048", "-p", "auto")
    with Up(state, *arguments, env=env, program=program) as up:
        eventually(lambda: "waiting for the NVIDIA driver" in up.output, lambda: f"the line is printed: {up.output}")
        yield Row("a driver hangs: a line that names it after", time.monotonic() - began_s, "s", 3.0)
        eventually(lambda: alive(up), lambda: f"/livez answers: {up.output}")
        yield Row("a driver hangs: /livez answers after", time.monotonic() - began_s, "s", 10.0)
        yield from latencies(up, "a driver hangs", seconds)
        hang.unlink()


def hung_disk(state: Path, model: Path, seconds: float) -> Iterator[Row]:
    """No file of edgellm or of the model can be opened while it serves, and a reload waits for one."""
    state.mkdir(parents=True)
    library, hang = state / "hang.so", state / "hang"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, HANGING_OPEN, "-ldl"], check=True)
    here = state / "models" / model.name
    here.parent.mkdir()
    shutil.copy(model, here)
    env = {"LD_PRELOAD": str(library), "HANG_PATH": f"{state}/", "HANG_EXCEPT": f"{state}/run/", "HANG_FILE": str(hang)}
    with Up(state, "-p", "cpu", "-m", f"demo={here}", "--set", "n_ctx=2048", env=env) as up:
        up.wait_for("ok", "degraded")
        hang.touch()
        up.process.send_signal(signal.SIGHUP)
        yield from latencies(up, "a disk hangs and a reload waits for it", seconds)
        began_s = time.monotonic()
        up.process.terminate()
        up.process.wait()
        yield Row("a disk hangs: the stop takes", time.monotonic() - began_s, "s", 10.0)


def flooded_log(state: Path, model: Path, seconds: float) -> Iterator[Row]:
    """An engine serves and prints without a pause, in lines and without line ends."""
    fake = llama_switches.write_fake(state / "engine", load_s=0.1)
    for name, text in (("lines", "x" * 99 + "\\n"), ("one endless line", "x" * 4096)):
        script = state / "engine" / f"{name.split()[0]}.sh"
        go = state / f"go-{name.split()[0]}"
        wait = f"import os, time\nwhile not os.path.exists('{go}'): time.sleep(0.05)\n"
        flood = f"{wait}while True: os.write(2, b'{text}' * 100)"
        # The program's own questions (--help, --version) get no flood.
        script.write_text(
            f'#!/bin/sh\n# {llama_switches.PROGRESS_MARK}\ncase "$*" in *--model*|*"-m "*) '
            f'"{sys.executable}" -S -c "{flood}" & ;; esac\nexec "{fake}" "$@"\n'
        )
        script.chmod(0o755)
        where = state / name.split()[0]
        with Up(where, "-p", "cpu", "-m", f"demo={model}", "--engine", str(script), "--set", "n_ctx=2048") as up:
            up.wait_for("ok", "degraded")
            go.touch()
            eventually(lambda: flooded(up), "lines of the flood arrive")
            yield from latencies(up, f"an engine floods its log with {name}", seconds)


def latencies(up: Up, what: str, seconds: float) -> Iterator[Row]:
    times, until_s = [], time.monotonic() + seconds
    with httpx.Client(timeout=60) as client:
        client.get(f"{up.url}/livez").raise_for_status()
        while time.monotonic() < until_s:
            began = time.perf_counter()
            client.get(f"{up.url}/livez").raise_for_status()
            times.append((time.perf_counter() - began) * 1000)
            time.sleep(PAUSE_S)
    times.sort()
    yield Row(f"{what}: /livez, median of {len(times)}", times[len(times) // 2], "ms")
    yield Row(f"{what}: /livez, p99", times[int(len(times) * 0.99)], "ms", LIMIT_MS)
    yield Row(f"{what}: /livez, longest", times[-1], "ms")


def flooded(up: Up) -> bool:
    return any("xxxx" in path.read_text(errors="replace") for path in (up.state / "run").rglob("*.log*"))


def alive(up: Up) -> bool:
    try:
        return httpx.get(f"{up.url}/livez", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    arguments = parser.parse_args()
    return report(list(measure(arguments.seconds)), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
