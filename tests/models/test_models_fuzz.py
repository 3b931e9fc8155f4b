"""Mutated headers: no hang, no crash, less than 50 MB and a second each."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge.models.verdict import VerdictError
from tests.fakes.gguf_writer import Gguf, pack, text

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> dict[str, Any]:
    """Runs the fuzzer as a process of its own; a hang, a crash or a foreign exception fails here."""
    command = [sys.executable, "-m", "tests.models.fuzz_headers", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["grown_kib"] < 50 * 1024
    return told


def fuzz(count: int, seed: int, folder: Path) -> None:
    told = run(count, seed, folder)
    # The mutations must reach deep: some files stay readable, some break in each way.
    assert {"read", "damaged", "truncated"} <= set(told["outcomes"])
    assert sum(told["outcomes"].values()) == count


def test_three_thousand_mutated_headers(tmp_path: Path) -> None:
    fuzz(3000, 1, tmp_path)


@pytest.mark.full
def test_a_hundred_thousand_mutated_headers(tmp_path: Path) -> None:
    fuzz(100_000, 2, tmp_path)


def worst_headers() -> dict[str, bytes]:
    """Files made to cost as much as the reader allows."""
    strings = Gguf("llama").raw("x", struct.pack("<IIQ", 9, 8, 2_000_000))
    keys = Gguf("llama")
    for number in range(60_000):
        keys.keys[f"k{number}"] = pack(1)
    tensors = Gguf("llama")
    for number in range(60_000):
        tensors.tensor(f"t{number}", 32)
        tensors.tensors[-1].type = 99
    words = Gguf("llama")
    for number in range(3000):
        words.set(f"w{number}", "x" * 4000)
    arrays = Gguf("llama")
    for number in range(500):
        arrays.set(f"a{number}", [0.0] * 4000)
    long_key = b"GGUF" + struct.pack("<IQQ", 3, 0, 9) + text("k" * 60_000)
    made = {"strings": strings, "keys": keys, "tensors": tensors, "words": words, "arrays": arrays}
    return {name: gguf.header() for name, gguf in made.items()} | {"long key": long_key}


@pytest.mark.parametrize("name", ["strings", "keys", "tensors", "words", "arrays", "long key"])
def test_the_worst_that_the_bounds_allow(tmp_path: Path, name: str) -> None:
    """Files made to cost as much as the reader allows, with a hole of 40 GB behind their lies."""
    path = tmp_path / "worst.gguf"
    path.write_bytes(worst_headers()[name])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (40 << 30))
    run("one", path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    from edge.models.reader import GgufReader

    path = Gguf("llama").model().save(tmp_path / "m.gguf")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(100)
    with path.open("rb", buffering=0) as file, pytest.raises(VerdictError):
        GgufReader(file, size, "m.gguf").header()
