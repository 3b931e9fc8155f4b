"""Speed and memory figures of the model store, measured here: python -m tests.bench.model_figures [--small]

    header   a 40 GB file with a vocabulary of 150,000 tokens and as many merges: wall time and memory
    list     200 files, second run: wall time of the survey and of the whole command
    check    check --deep of 1 GB against sha256 of the same file, paired, by wall and by CPU time
    pull     1 GB over HTTP from this machine against curl, paired; peak memory of the process

Other load on the machine changes wall times; pairs are run in turns, and the median is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.fakes.gguf_writer import Gguf

ROOT = Path(__file__).resolve().parents[2]
_SELF = "import sys; from pathlib import Path; status = Path('/proc/self/status')\n"
_PEAK = "print(int(status.read_text().partition('VmHWM:')[2].split()[0]))\n"


def python(program: str, *arguments: object, env: dict[str, str] | None = None) -> list[str]:
    """The lines that a fresh interpreter prints."""
    command = [sys.executable, "-c", _SELF + program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def vocabulary() -> Gguf:
    """Write a header like a large model's, whose vocabulary costs the time."""
    gguf = Gguf("llama").set("tokenizer.ggml.tokens", [f"token{n % 9973}" for n in range(151_936)])
    gguf.set("tokenizer.ggml.merges", [f"tok {n % 99_991}" for n in range(151_387)])
    gguf.set("tokenizer.ggml.token_type", [1] * 151_936)
    return gguf


def header(folder: Path) -> None:
    gguf = vocabulary().model(vocab=32)
    gguf.keys.update(vocabulary().keys)
    for layer in range(90):
        gguf.tensor(f"blk.{layer}.ffn_up_exps.weight", 8192, 8192, 10, type="Q5_K")
    path = gguf.save_sparse(folder / "big-Q5_K_M.gguf")
    program = (
        "import timeit; from edge.models.header import read_header; path = Path(sys.argv[1])\n"
        "print(min(timeit.repeat(lambda: read_header(path), number=1, repeat=6)))\n" + _PEAK
    )
    best, peak = python(program, path)
    size = path.stat().st_size / 1e9
    print(f"header   {size:.0f} GB file, 303,323 strings: {float(best) * 1000:.1f} ms, peak {int(peak) / 1024:.1f} MiB")


def listing(folder: Path) -> None:
    state = folder / "state"
    for number in range(200):
        Gguf("llama").model(vocab=2000).save(state / "data" / "models" / f"m{number}-Q5_K_M.gguf")
    program = (
        "import time; from edge.models.store import Store; from edge.models.survey import survey\n"
        "began = time.perf_counter(); lines = survey(Store(Path(sys.argv[1])), Path(sys.argv[2]))\n"
        "print(time.perf_counter() - began); assert len(lines) == 200"
    )
    first = python(program, state / "data" / "models", state / "cache")
    again = [python(program, state / "data" / "models", state / "cache") for _ in range(5)]
    env = {**os.environ, "EDGELLM_STATE_DIR": str(state), "HF_HUB_CACHE": str(folder)}
    command = [sys.executable, "-m", "edge", "model", "list", "--json"]
    whole = [timed(lambda: subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)) for _ in "123"]
    cold, warm = float(first[0]), min(float(run[0]) for run in again)
    print(
        f"list     200 files: {warm:.3f} s warm ({cold:.3f} s the first time), the whole command {min(whole)[0]:.2f} s"
    )


def check(folder: Path, size: int) -> None:
    from edge.models.check import check_deep
    from edge.models.open import open_model

    path = big(folder / "m-Q5_K_M.gguf", size)
    model = open_model(path)
    check_deep(model)
    ours, theirs = [], []
    for _ in range(5):
        ours.append(timed(lambda: check_deep(model)))
        theirs.append(timed(lambda: sha256(path)))
    wall = statistics.median(b[0] / a[0] for a, b in zip(ours, theirs, strict=True))
    cpu = statistics.median(b[1] / a[1] for a, b in zip(ours, theirs, strict=True))
    rate = size / min(a[0] for a in ours) / 1e6
    print(f"check    {size / 1e9:.1f} GB: {wall:.0%} of sha256's speed by wall, {cpu:.0%} by CPU, best {rate:.0f} MB/s")


def sha256(path: Path) -> str:
    """Hash a file with the plainest loop, for comparison."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def big(path: Path, size: int) -> Path:
    """A model of about `size` bytes with all kinds of content."""
    columns = 4096
    rows = size * 256 // 176 // columns
    gguf = Gguf("llama").model()
    gguf.tensor("big.weight", columns, rows, type="Q5_K")
    path.parent.mkdir(parents=True, exist_ok=True)
    gguf.save_sparse(path)
    block = bytes(range(1, 60)) * 17772  # no float made of these bytes is special
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - gguf.tensors[-1].size)
        left = gguf.tensors[-1].size
        while left:
            left -= file.write(block[:left])
    return path


def pull(folder: Path, size: int) -> None:
    source = big(folder / "served" / "owner" / "repo" / "m-Q5_K_M.gguf", size)
    command = [sys.executable, "-m", "tests.fakes.hub", str(source.parents[2])]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        url = server.stdout.readline().strip()
        for kind in ("url", "hub"):
            ours, theirs, peaks = [], [], []
            for _ in range(7):
                wall, peak = one_pull(folder / "models", url, kind)
                ours.append(wall)
                peaks.append(peak)
                theirs.append(curl(f"{url}/files/owner/repo/{source.name}", folder / "curl.out"))
            ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            rate = size / min(ours) / 1e6
            print(
                f"pull     {size / 1e9:.1f} GB by {kind}: {ratio:.0%} of curl's throughput, best {rate:.0f} MB/s "
                f"(curl {size / min(theirs) / 1e6:.0f}), peak {max(peaks) / 1024:.1f} MiB"
            )
        server.stdin.close()


def one_pull(models: Path, url: str, kind: str) -> tuple[float, int]:
    """Seconds of the pull itself, imports left out, and the peak memory of its process in KiB."""
    ref = f"{url}/files/owner/repo/m-Q5_K_M.gguf" if kind == "url" else "hf://owner/repo"
    program = (
        "import time, httpx; from edge.models.pull import pull; import edge.models.transfer, edge.models.pull\n"
        "t = time.perf_counter(); pull(sys.argv[1], Path(sys.argv[2])); print(time.perf_counter() - t)\n" + _PEAK
    )
    shutil.rmtree(models, ignore_errors=True)
    wall, peak = python(program, ref, models, env={**os.environ, "HF_ENDPOINT": url})
    return float(wall), int(peak)


def curl(url: str, target: Path) -> float:
    target.unlink(missing_ok=True)
    return timed(lambda: subprocess.run(["curl", "-s", "-f", "-o", str(target), url], check=True))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="100 MB instead of 1 GB")
    parser.add_argument("--only", choices=("header", "list", "check", "pull"))
    options = parser.parse_args()
    size = 10**8 if options.small else 10**9
    print(json.dumps({"python": sys.version.split()[0], "cpus": os.cpu_count(), "load": os.getloadavg()[0]}))
    works = {"header": header, "list": listing, "check": lambda f: check(f, size), "pull": lambda f: pull(f, size)}
    for name, work in works.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="edgellm-bench-") as folder:
                work(Path(folder))


if __name__ == "__main__":
    main()
