"""The memory estimate against the real engine: what llama.cpp says it allocates, over models of many shapes.

Weights and KV within 5 %, compute buffers within 15 %.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from gguf import PoolingType
from msgspec.structs import replace

from edge.config.values import Preset
from edge.engine.embedded_engine import find_embedded
from edge.engine.engine import Engine
from edge.models.store import open_model
from edge.plan.argv import NO_OPTIONS, EnvFacts, environment, render
from edge.plan.engine_options import engine_options
from edge.plan.inputs import Candidate, candidate_of, role_of, situation
from edge.plan.ladder import settings
from edge.plan.ladder_steps import LadderStep
from edge.plan.memory import budget
from edge.plan.plan import EngineOptions, Settings
from edge.units import MIB
from tests.plan import shapes
from tests.plan.random_gguf import Shape, write

_LINE = re.compile(r"(?P<kind>model|KV|RS|compute|output) buffer size =\s+(?P<mib>[\d.]+) MiB")

SHAPES = {
    "dense": Shape(),
    "grouped": Shape(embd=512, heads=4, kv_heads=2, head_size=128, ff=1024),
    "wide-heads": Shape(embd=256, heads=16, kv_heads=4, head_size=128, ff=512),
    "wide-ffn-tied": Shape(embd=256, ff=4096, tied=True),
    "qwen3": Shape(arch="qwen3", embd=256, heads=8, kv_heads=2, head_size=128, ff=768, tied=True),
    "experts": Shape(arch="qwen3moe", embd=256, heads=8, kv_heads=2, head_size=128, ff=256, experts=(16, 8)),
    "window": Shape(
        arch="gemma3", layers=7, embd=256, heads=4, kv_heads=1, head_size=256, ff=1024, window=512, tied=True
    ),
    "per-layer-heads": Shape(arch="deci", kv_heads=(4, 2, 1, 4)),
    "convolutions": Shape(arch="lfm2", layers=6, kv_heads=(0, 0, 4, 0, 4, 0), tied=True),
    "encoder": Shape(arch="bert", embd=384, heads=6, kv_heads=6, ff=1536, ctx=512, pooling=PoolingType.MEAN),
    "pooled-last": Shape(arch="qwen3", embd=256, ff=768, tied=True, pooling=PoolingType.LAST),
    "pooled-mean": Shape(embd=256, ff=768, pooling=PoolingType.MEAN),
    "q8_0": Shape(type=Type.Q8_0, embd=512, ff=2048, heads=8, kv_heads=8),
}

# model, context over all slots, K type, V type, slots, flash attention
CASES = [
    ("smollm2", 2048, "f16", "f16", 1, "auto"),
    ("smollm2", 8192, "q8_0", "q8_0", 4, "on"),
    ("smollm2", 4096, "f16", "f16", 1, "off"),
    ("dense", 1024, "f16", "f16", 1, "on"),
    ("dense", 16384, "q4_0", "q4_0", 2, "on"),
    ("grouped", 4096, "q8_0", "f16", 1, "on"),
    ("wide-heads", 4096, "f16", "f16", 1, "on"),
    ("wide-heads", 4096, "f16", "f16", 1, "off"),
    ("wide-ffn-tied", 8192, "bf16", "bf16", 4, "on"),
    ("qwen3", 4096, "q5_1", "q5_1", 1, "on"),
    ("experts", 4096, "f16", "f16", 2, "on"),
    ("window", 8192, "f16", "f16", 1, "on"),
    ("window", 4096, "q8_0", "q8_0", 2, "on"),
    ("per-layer-heads", 4096, "f16", "f16", 2, "on"),
    ("per-layer-heads", 4096, "f16", "f16", 1, "off"),
    ("convolutions", 4096, "f16", "f16", 2, "on"),
    ("encoder", 512, "f16", "f16", 1, "auto"),
    ("pooled-last", 2048, "f16", "f16", 1, "auto"),
    ("pooled-mean", 2048, "f16", "f16", 1, "auto"),
    ("q8_0", 8192, "q8_0", "q8_0", 1, "on"),
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    found = find_embedded(sys.executable)
    assert found is not None, "the embedded engine is part of the development extras"
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short, because sockets live in it."""
    with tempfile.TemporaryDirectory(prefix="plan-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize(("name", "n_ctx", "key", "value", "slots", "flash"), CASES)
def test_estimate_agrees_with_what_the_engine_allocates(
    name: str,
    n_ctx: int,
    key: str,
    value: str,
    slots: int,
    flash: str,
    engine: Engine,
    folder: Path,
    smollm2: Path,
) -> None:
    path = smollm2 if name == "smollm2" else folder / f"{name}.gguf"
    if not path.exists():
        write(path, SHAPES[name], smollm2)
    it = candidate_of(open_model(path))
    board = shapes.cpu_board(cores=2)
    inputs = situation(board, shapes.memory(board), engine, "1GiB", {})
    preset = Preset(offload="none", flash_attention=flash, n_parallel=slots, cache_ram=0)
    chosen = settings(preset, LadderStep(n_ctx, slots, key, value), it, role_of(it.file.meta, "chat"), inputs)
    estimate = budget(it, chosen, inputs)["host"]
    reported = allocated(chosen, it, engine, folder)
    assert estimate.weights_bytes == pytest.approx(reported["model"], rel=0.05)
    assert estimate.kv_bytes == pytest.approx(reported.get("KV", 0) + reported.get("RS", 0), rel=0.05)
    assert estimate.compute_bytes == pytest.approx(reported["compute"] + reported["output"], rel=0.15)


def test_what_drafts_is_counted_as_the_engine_allocates_it(engine: Engine, folder: Path, smollm2: Path) -> None:
    """Weights, cache and buffers of the drafter, whose context is the model's and not the one it was trained for."""
    drafter = write(folder / "short.gguf", Shape(embd=256, ff=768, ctx=256), smollm2)
    it = candidate_of(open_model(smollm2))
    it = replace(it, file=replace(it.file, drafter=str(drafter)), drafter=candidate_of(open_model(drafter)))
    board = shapes.cpu_board(cores=2)
    inputs = situation(board, shapes.memory(board), engine, "1GiB", {})
    preset = Preset(offload="none", flash_attention="on", n_parallel=2, cache_ram=0, draft=str(drafter))
    alone, drafted = replace(it, drafter=None), it
    chosen = settings(preset, LadderStep(4096, 2, "q8_0", "q8_0"), drafted, "chat", inputs)
    assert chosen.draft_device == "none"
    counted, real = [], []
    for each in (alone, drafted):
        options = engine_options(preset, engine, {}) if each.drafter else NO_OPTIONS
        counted.append(budget(each, chosen, inputs)["host"].required_bytes)
        # Without the drafter's path the engine loads none.
        real.append(sum(allocated(chosen, each, engine, folder, options).values()))
    assert counted[1] - counted[0] == pytest.approx(real[1] - real[0], rel=0.1)


def allocated(
    chosen: Settings,
    it: Candidate,
    engine: Engine,
    folder: Path,
    options: EngineOptions = NO_OPTIONS,
) -> dict[str, float]:
    """Starts the engine as the plan says, reads its log until the model is loaded, ends it. → bytes by kind."""
    socket = folder / "engine.sock"
    socket.unlink(missing_ok=True)  # the engine does not take over a socket that is there
    command = [
        part.format(socket=socket) if part == "{socket}" else part
        for part in render(chosen, engine, it.file, "m", options).args
    ]
    sums: dict[str, float] = {}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(engine, EnvFacts(str(folder), str(folder))),
    ) as child:
        assert child.stderr is not None
        tail: list[str] = []
        try:
            for line in child.stderr:
                tail.append(line)
                for found in _LINE.finditer(line):
                    sums[found["kind"]] = sums.get(found["kind"], 0.0) + float(found["mib"]) * MIB
                if "model loaded" in line:
                    break
            else:
                pytest.fail("the engine did not load the model:\n" + "".join(tail[-20:]))
        finally:
            child.kill()
    return sums
