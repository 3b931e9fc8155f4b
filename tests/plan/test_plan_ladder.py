"""What holds for every ladder: rungs need less and less, contexts cost, and a plan that fits has room."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.config.values import Preset
from edge.plan.inputs import Candidate, PlanInputs, candidate_of, situation
from edge.plan.ladder import settings as make_settings
from edge.plan.ladder import walk_ladder
from edge.plan.ladder_steps import LadderStep, bits, context_levels, steps
from edge.plan.memory import budget, device_required
from edge.units import GIB
from tests.plan import shapes

SIZES = [(16, 1024, 8, 4096), (28, 2048, 8, 6144), (32, 4096, 8, 14336), (64, 5120, 8, 25600)]


@st.composite
def subjects(draw: st.DrawFn) -> Candidate:
    layers, embd, heads, ff = draw(st.sampled_from(SIZES))
    arch, window = draw(st.sampled_from([("llama", None), ("gemma3", 1024), ("gpt-oss", 128)]))
    hybrid = draw(st.booleans())
    extra = {"ssm.state_size": 128, "ssm.inner_size": 4096, "ssm.conv_kernel": 4, "ssm.group_count": 16}
    header = shapes.meta(
        "qwen35" if hybrid else arch,
        layers=layers,
        embd=embd,
        heads=embd // 128,
        kv_heads=heads,
        ff=ff,
        ctx=draw(st.sampled_from([2048, 8192, 40960, 131072, 262144])),
        window=None if hybrid else window,
        quant=draw(st.sampled_from(["Q4_K_M", "Q5_K_M", "Q8_0", "F16"])),
        tied=draw(st.booleans()),
        extra=extra if hybrid else None,
    )
    return candidate_of(shapes.model(header=header))


preset = st.builds(
    Preset,
    n_ctx=st.sampled_from([0, 512, 4096, 10_000, 32768, 262144]),
    n_ctx_min=st.sampled_from([256, 2048, 8192]),
    n_parallel=st.integers(1, 6),
    offload=st.sampled_from(["full", "none"]),
    partial_offload=st.booleans(),
    fallback=st.sampled_from(["refuse", "cpu"]),
    load_mode=st.sampled_from(["auto", "none", "mmap", "dio"]),
    kv_type_k=st.sampled_from(["f16", "bf16", "q8_0", "q5_0"]),
    kv_type_v=st.sampled_from(["f16", "q8_0"]),
    kv_type_min=st.sampled_from(["f16", "q8_0", "q4_0"]),
    flash_attention=st.sampled_from(["auto", "on", "off"]),
    n_ubatch=st.sampled_from([128, 512, 2048]),
    cache_ram=st.sampled_from([0, GIB]),
    split_mode=st.sampled_from(["none", "layer"]),
)


def every_step(preset: Preset, it: Candidate) -> list[LadderStep]:
    meta = it.file.meta
    return [step for context in context_levels(preset, meta.n_ctx_train) for step in steps(preset, meta, context)]


@st.composite
def places(draw: st.DrawFn) -> PlanInputs:
    kind = draw(st.sampled_from(["unified", "cpu", "gpu", "gpus"]))
    size = draw(st.floats(2, 120))
    board = {
        "unified": shapes.jetson(size),
        "cpu": shapes.cpu_board(size),
        "gpu": shapes.gpu_board(size, memory_gib=draw(st.floats(4, 200))),
        "gpus": shapes.gpu_board(size, draw(st.floats(4, 80)), memory_gib=draw(st.floats(4, 200))),
    }[kind]
    engine = shapes.engine(cuda=kind != "cpu", era=draw(st.sampled_from(["load-mode", "flash-value"])))
    free = draw(st.floats(0.2, 1.0)) * board.memory_bytes / GIB
    return situation(board, shapes.memory(board, free), engine, "max(1GiB, 10%)", {})


@settings(max_examples=60, deadline=None)
@given(subjects(), preset, places())
def test_each_rung_needs_less_than_the_one_before(it: Candidate, preset: Preset, inputs: PlanInputs) -> None:
    rungs = walk_ladder(preset, [it], "chat", inputs)
    for before, after in pairwise(rungs):
        if not after.gpus and before.gpus:  # the CPU alone comes last, where the preset allows it
            assert after is rungs[-1] and preset.fallback == "cpu"
        elif before.fits == after.fits and set(after.gpus) <= set(before.gpus):
            assert device_required(after.budget, inputs) < device_required(before.budget, inputs)
        elif before.fits == after.fits:  # a card more: the fullest has more room
            left = [min(rung.budget[name].headroom_bytes for name in rung.gpus) for rung in (before, after)]
            assert left[0] < left[1]
        else:
            assert after.fits, "no step leads from a rung that fits to one that does not"
    for rung in rungs:
        fits = all(domain.headroom_bytes >= 0 for domain in rung.budget.values())
        assert rung.fits == fits
        for name, domain in rung.budget.items():
            assert domain.headroom_bytes == inputs.available_bytes[name] - inputs.reserve_bytes[name] - (
                domain.weights_bytes
                + domain.kv_bytes
                + domain.compute_bytes
                + domain.context_bytes
                + domain.prompt_cache_bytes
                + domain.page_cache_bytes
            )


@settings(max_examples=60, deadline=None)
@given(subjects(), preset, places(), st.integers(1, 4), st.lists(st.integers(256, 200_000), min_size=2, max_size=4))
def test_more_context_never_needs_less_memory(
    it: Candidate, preset: Preset, inputs: PlanInputs, slots: int, contexts: list[int]
) -> None:
    preset = replace(preset, cache_ram=0)  # checkpoints are paid for out of its cap: their number falls with their size
    needs = []
    for n_ctx in sorted(contexts):
        chosen = make_settings(preset, LadderStep(n_ctx, slots, "f16", "f16"), it, "chat", inputs)
        domains = budget(it, chosen, inputs)
        needs.append((domains[inputs.host].required_bytes, sum(domain.required_bytes for domain in domains.values())))
    for less, more in pairwise(needs):  # layers may move from one GPU to another
        assert more[0] >= less[0] and more[1] >= less[1]


@settings(max_examples=60, deadline=None)
@given(subjects(), preset)
def test_steps_keep_to_the_profile_and_the_trained_context(it: Candidate, preset: Preset) -> None:
    trained = it.file.meta.n_ctx_train
    found = every_step(preset, it)
    for step in found:
        slot = step.n_ctx // step.n_parallel
        assert 256 <= slot <= trained
        assert slot >= min(preset.n_ctx_min, found[0].n_ctx // found[0].n_parallel)
        assert 1 <= step.n_parallel <= preset.n_parallel
        assert bits(step.kv_type_k) >= min(bits(preset.kv_type_min), bits(preset.kv_type_k))
        if preset.flash_attention == "off":
            assert step.kv_type_v == preset.kv_type_v


@settings(max_examples=40, deadline=None)
@given(subjects(), preset, places())
def test_a_quantized_v_cache_always_comes_with_flash_attention(
    it: Candidate, preset: Preset, inputs: PlanInputs
) -> None:
    for rung in walk_ladder(replace(preset, flash_attention="auto"), [it], "chat", inputs):
        if rung.settings.kv_type_v not in ("f16", "bf16", "f32"):
            assert rung.settings.flash_attention == "on"


def test_the_order_of_steps() -> None:
    """Smaller KV type, no prompt cache, fewer slots; the context of a request comes last."""
    preset = Preset(n_ctx=32768, n_ctx_min=8192, n_parallel=2)
    it = candidate_of(shapes.model())
    found = [(s.n_ctx, s.n_parallel, s.kv_type_k, s.prompt_cache) for s in every_step(preset, it)]
    assert found == [
        (65536, 2, "f16", True),
        (65536, 2, "q8_0", True),
        (65536, 2, "q8_0", False),
        (32768, 1, "q8_0", True),
        (32768, 1, "q8_0", False),
        (16384, 1, "q8_0", True),
        (16384, 1, "q8_0", False),
        (8192, 1, "q8_0", True),
        (8192, 1, "q8_0", False),
    ]


@settings(max_examples=80, deadline=None)
@given(subjects(), preset, places(), st.lists(st.floats(0.3, 64), min_size=2, max_size=5))
def test_more_memory_never_means_less_context(
    it: Candidate, preset: Preset, inputs: PlanInputs, free_gib: list[float]
) -> None:
    """With one file and with its smaller quantization behind it."""
    it = replace(it, file=replace(it.file, name="M"))
    small = candidate_of(replace(it.file, quant="small", meta=shapes.meta(layers=8, ctx=it.file.meta.n_ctx_train)))
    for candidates in ([it], [it, small]):
        contexts = []
        for gib in sorted(free_gib):
            free = {name: int(gib * GIB) + inputs.reserve_bytes[name] for name in inputs.available_bytes}
            rungs = walk_ladder(preset, candidates, "chat", replace(inputs, available_bytes=free))
            first = next((rung.settings for rung in rungs if rung.fits), None)
            contexts.append(first.n_ctx // first.n_parallel if first else 0)
        assert contexts == sorted(contexts), (free_gib, contexts)


def test_smaller_files_come_before_a_smaller_context() -> None:
    large, small = (candidate_of(shapes.model(header=shapes.meta(quant=quant))) for quant in ("Q5_K_M", "Q4_K_M"))
    board = shapes.jetson(16)
    inputs = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    rungs = walk_ladder(Preset(n_ctx=8192), [large, small], "chat", inputs)
    order = [(rung.candidate.file.quant, rung.settings.n_ctx) for rung in rungs]
    assert [quant for quant, _ in order] == sorted((quant for quant, _ in order), reverse=True)
    assert {("Q5_K_M", 8192), ("Q4_K_M", 8192), ("Q4_K_M", 4096)} == set(order)


def test_partial_offload_exists_on_discrete_gpus_only() -> None:
    it = candidate_of(shapes.model())
    preset = Preset(n_ctx=4096, partial_offload=True, fallback="cpu", split_mode="none")
    board = shapes.gpu_board(4)
    inputs = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    layers = [rung.settings.n_gpu_layers for rung in walk_ladder(preset, [it], "chat", inputs)]
    assert layers[0] == 33
    assert layers[-1] == 0
    assert 0 < layers[-3] < 33
    chosen = next(rung for rung in walk_ladder(preset, [it], "chat", inputs) if rung.fits)
    assert 0 < chosen.settings.n_gpu_layers < 33
    assert chosen.settings.load_mode == "mmap"  # a host part could not be dropped otherwise (FC-19)
    refusing = walk_ladder(replace(preset, fallback="refuse"), [it], "chat", inputs)
    assert refusing[-1].settings.n_gpu_layers > 0
    board = shapes.jetson(4)
    unified = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    assert {rung.settings.n_gpu_layers for rung in walk_ladder(preset, [it], "chat", unified)} == {33}


@pytest.mark.parametrize("scaling", ["yarn", "linear"])
def test_a_context_that_rope_extends_is_paid_for(scaling: str) -> None:
    """Four times what the file was trained for: four times the cache."""
    it = candidate_of(shapes.model("8B", shapes.meta(ctx=8192)))
    board = shapes.gpu_board(80)
    inputs = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    plain = Preset(n_ctx=1 << 20)
    extended = replace(plain, rope_scaling=scaling, rope_scale=4.0)
    first, wide = (walk_ladder(preset, [it], "chat", inputs)[0] for preset in (plain, extended))
    assert (first.settings.n_ctx, wide.settings.n_ctx) == (8192, 32768)
    sizes = [sum(domain.kv_bytes for domain in rung.budget.values()) for rung in (first, wide)]
    assert sizes[1] == 4 * sizes[0] > 0
