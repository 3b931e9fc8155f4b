"""Mutates healthy headers and reads them; run as a process of its own so that its memory is its own.

    python -m tests.models.fuzz_headers COUNT SEED FOLDER
    python -m tests.models.fuzz_headers one FILE

Prints one JSON line: what came of the files, CPU seconds and the growth of the process. A read that takes a second
of CPU ends it by SIGPROF; any exception but a verdict ends it with a traceback.
"""

from __future__ import annotations

import json
import random
import signal
import struct
import sys
import time
from collections import Counter
from pathlib import Path

from edge.models.header import read_header
from edge.models.verdict import VerdictError
from tests.fakes.gguf_writer import Gguf

_HUGE = (0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1, 10**6, 65536)
_HOLE_BYTES = 40 << 30


def peak_kib() -> int:
    """The most memory this process has had. (ru_maxrss would count what its parent had before exec.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def seeds() -> list[bytes]:
    plain = Gguf("llama").model()
    layered = Gguf("gemma4").model(n_layer=4).set("gemma4.attention.head_count_kv", [4, 4, 2, 0])
    layered.set("gemma4.attention.sliding_window_pattern", [True, True, True, False])
    shard = Gguf("llama").model().set("split.no", 1, 2).set("split.count", 3, 2).set("split.tensors.count", 99, 5)
    many = Gguf("qwen3moe").model(n_layer=12, vocab=400).set("qwen3moe.expert_count", 8)
    return [one.bytes()[: len(one.header()) + 64] for one in (plain, layered, shard, many, Gguf("clip").projector())]


def mutate(base: bytes, rng: random.Random) -> bytes:
    data = bytearray(base)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data)) if data else 0
        choice = rng.randrange(6)
        if choice == 0 and data:
            data[at] = rng.randrange(256)
        elif choice == 1:
            struct.pack_into("<Q", data, min(at, max(0, len(data) - 8)), rng.choice(_HUGE)) if len(data) >= 8 else None
        elif choice == 2:
            del data[at : at + rng.randrange(1, 40)]
        elif choice == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif choice == 4:
            del data[at:]
        else:
            other = rng.randrange(len(data)) if data else 0
            data[at : at + 16] = data[other : other + 16]
    return bytes(data)


def main(count: int, seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    bases = seeds()
    for base in bases:
        one_read(base, 1 << 30, folder / "warm.gguf")
    before = peak_kib()
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        data = mutate(rng.choice(bases), rng)
        # With a hole behind it, a lie about a length is not found out by the end of the file.
        hole = _HOLE_BYTES if rng.random() < 0.5 else 0
        outcomes[one_read(data, hole, folder / "fuzz.gguf")] += 1
    grown = peak_kib() - before
    print(json.dumps({"outcomes": outcomes, "grown_kib": grown}))


def one(path: Path) -> None:
    """One file as it is."""
    one_read(seeds()[0], 1 << 30, path.with_suffix(".warm"))
    before, started = peak_kib(), time.process_time()
    outcome = judge(path)
    grown = peak_kib() - before
    print(json.dumps({"outcomes": {outcome: 1}, "grown_kib": grown, "cpu_s": time.process_time() - started}))


def one_read(data: bytes, hole: int, path: Path) -> str:
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + hole)
    return judge(path)


def judge(path: Path) -> str:
    signal.setitimer(signal.ITIMER_PROF, 1.0)
    try:
        read_header(path)
        return "read"
    except VerdictError as error:
        return error.verdict.kind
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    if sys.argv[1] == "one":
        one(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
