"""The estimate of compute buffers: never under what an engine allocated, and its allocator's rules."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from msgspec.structs import replace

from edge.board.board import Board
from edge.models.open import open_model
from edge.plan.compute import Arena, compute_bytes, device_compute_bytes, host_compute_bytes
from edge.plan.inputs import Candidate, candidate_of
from edge.plan.kv_cache import memory_of
from edge.plan.plan import Settings
from edge.units import MIB
from tests.bench.memory import LOG_BYTES, SETTINGS, plan
from tests.bench.memory_models import MODELS, write_model
from tests.plan import shapes
from tests.plan.architectures import KNOWN

# What engines allocated, in KiB by model and setting: weights, KV, compute. The rows of `python -m tests.bench.memory`:
# "embedded" and "pinned" on an EPYC, "gpu" on an H200.
ALLOCATED: dict[str, dict[str, list[list[int]]]] = json.loads(
    Path(__file__).with_name("allocated.json").read_text(encoding="utf-8")
)
LOG_KIB = LOG_BYTES // 1024
ISA = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "fma", "f16c", "bmi2", "sse4_2")


def board(where: str) -> Board:
    if where == "gpu":
        return shapes.gpu_board(140)
    cpu = shapes.cpu_board(64)
    return replace(cpu, cpu=replace(cpu.cpu, isa=ISA))


@cache
def candidate(model: str) -> Candidate:
    with TemporaryDirectory() as folder:
        return candidate_of(open_model(write_model(model, Path(folder))))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("where", ["embedded", "pinned", "gpu"])
def test_a_plan_is_within_two_percent_and_never_under_what_an_engine_allocated(where: str, model: str) -> None:
    """Compute 15 % or 24 MiB, total 2 %, weights 0.5 %, KV 1 %."""
    engine = shapes.engine(cuda=where == "gpu")
    engine = replace(engine, kind="embedded", commit=None) if where == "embedded" else engine
    for setting, (weights, kv, compute) in zip(SETTINGS, ALLOCATED[where][model], strict=True):
        planned = plan(candidate(model), setting, board(where), engine)[2]
        total, there = sum(planned.values()) / 1024, weights + kv + compute
        assert planned["weights"] / 1024 == pytest.approx(weights, rel=0.005, abs=LOG_KIB)
        assert planned["kv"] / 1024 == pytest.approx(kv, rel=0.01)
        assert compute <= planned["compute"] / 1024 + LOG_KIB
        assert planned["compute"] / 1024 - compute <= max(0.15 * compute, 24 * 1024)
        assert there <= total + LOG_KIB
        assert total <= 1.02 * there


# Compute buffers of the device that has the larger one and of the host, in MiB, as the pinned llama-server logged them
# with two rpc-servers.
SEVERAL = [
    ("llama-wide", 0, 80.04, 36.05),
    ("llama-wide", 2, 288.35, 148.36),
    ("llama-wide", 3, 208.02, 68.03),
    ("gemma3-wide", 0, 86.07, 42.08),
]


@pytest.mark.parametrize(("model", "index", "device", "host"), SEVERAL)
def test_devices_that_hold_all_layers_keep_the_inputs_of_four_batches(
    model: str, index: int, device: float, host: float
) -> None:
    it = candidate(model)
    one = plan(it, SETTINGS[index], board("gpu"), shapes.engine(cuda=True))[0]
    several = replace(one, devices=("CUDA0", "CUDA1"), split_mode="layer", tensor_split=(1.0, 1.0))
    meta, memory = it.file.meta, it.memory
    assert device <= device_compute_bytes(meta, memory, several) / MIB <= 1.02 * device
    # The estimate has the output of all slots, and V's indices for each slot.
    assert host <= host_compute_bytes(meta, memory, several, mixed=False) / MIB <= 1.05 * host
    partial = replace(several, n_gpu_layers=one.n_gpu_layers - 1)  # no layers at once
    assert device_compute_bytes(meta, memory, partial) == device_compute_bytes(meta, memory, one)


def test_recorded_allocations_cover_every_model_of_the_sweep() -> None:
    assert {where: set(rows) for where, rows in ALLOCATED.items()} == {where: set(MODELS) for where in ALLOCATED}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_held_never_overlaps_and_freed_memory_is_used_again(seed: int) -> None:
    random, arena = Random(seed), Arena()
    held: list[str] = []
    most = live = 0
    sizes: dict[str, int] = {}
    for index in range(200):
        if held and random.random() < 0.45:
            name = held.pop(random.randrange(len(held)))
            arena.free(name)
            live -= sizes[name]
        else:
            name = str(index)
            sizes[name] = random.choice((0, 1, 8, 64, 100))
            arena.take(name, sizes[name])
            held.append(name)
            live += sizes[name]
            most = max(most, live)
        placed = sorted(place for place in arena.places.values() if place[1])
        assert all(at + size <= later for (at, size), (later, _) in pairwise(placed))
    assert most <= arena.peak_bytes <= sum(sizes.values())
    for name in held:
        arena.free(name)
    peak = arena.peak_bytes
    arena.take("all of it", peak)
    assert (arena.places, arena.peak_bytes) == ({"all of it": (0, peak)}, peak)


def test_the_smallest_hole_that_fits_is_taken_and_of_equal_ones_the_last() -> None:
    """ggml-alloc.c, ggml_dyn_tallocr_alloc: `block->size <= best_fit_size`."""
    arena = Arena()
    for name, size in (("a", 30), ("1", 1), ("b", 20), ("2", 1), ("c", 20), ("3", 1)):
        arena.take(name, size)
    for name in "abc":
        arena.free(name)
    arena.take("d", 20)
    assert arena.places["d"] == (52, 20)
    arena.take("e", 25)
    assert arena.places["e"] == (0, 25)


@pytest.mark.parametrize("arch", json.loads(KNOWN.read_text()))
@pytest.mark.parametrize("flash", ["on", "off"])
def test_every_architecture_has_an_estimate(arch: str, flash: str) -> None:
    """With keys that any of them may have; the wider the batch, the more."""
    keys = {
        "expert_count": 8,
        "expert_used_count": 2,
        "ssm.inner_size": 1024,
        "ssm.state_size": 16,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 2,
        "embedding_length_per_layer_input": 64,
        "attention.shared_kv_layers": 2,
    }
    for extra in ({}, keys, {**keys, "attention.key_length_mla": 96, "ssm.group_count": 0}):
        meta = shapes.meta(arch, layers=8, embd=512, heads=8, kv_heads=2, window=256, extra=extra)
        for layers, cache_type in ((0, "f16"), (9, "f16"), (9, "q8_0"), (0, "q8_0")):
            if flash == "off" and cache_type != "f16":
                continue
            base = Settings(4096, 1, layers, cache_type, cache_type, flash, "none", 8, 0, n_batch=256, n_ubatch=256)
            estimate = device_compute_bytes if layers else compute_bytes
            small = estimate(meta, memory_of(meta), base)
            large = estimate(meta, memory_of(meta), replace(base, n_batch=512, n_ubatch=512))
            assert 0 < small < large < 4096 * MIB
