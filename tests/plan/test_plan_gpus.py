"""Several GPUs: more of them never make a plan worse, and one that cannot pay for itself is left out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.config.values import ModelConfig, Preset, Profile
from edge.engine.engine import Flag
from edge.errors import DoesNotFitError
from edge.plan.argv import EnvFacts
from edge.plan.inputs import Candidate, candidate_of
from edge.plan.plan import LaunchPlan, Plan, Settings
from edge.plan.planner import make_plan
from edge.plan.prepare import assumed_engine
from edge.units import GIB
from tests.plan import shapes

LLAMA_70B = shapes.meta(layers=80, embd=8192, heads=64, ff=28672, quant="Q4_K_M")
GEMMA_12B = shapes.meta("gemma3", layers=48, embd=3840, ff=15360, window=1024, tied=True)
CODESTRAL_22B = shapes.meta(layers=56, embd=6144, heads=48, ff=16384, vocab=32768, quant="Q6_K")


def experts(layers: int = 48, count: int = 128) -> Candidate:
    """The shape of Qwen3-30B-A3B: nine tenths of its weights are experts."""
    meta = shapes.meta(
        "qwen3moe",
        layers=layers,
        embd=2048,
        kv_heads=4,
        ff=768,
        quant="Q5_K_M",
        extra={"expert_count": count, "expert_used_count": 8, "expert_feed_forward_length": 768},
    )
    return candidate_of(shapes.model("Experts", shapes.with_experts(meta, count, 768)))


def planned(
    it: Candidate, *vram_gib: float, host_gib: float = 64, capabilities: Sequence[str] = (), **preset: object
) -> Plan:
    board = shapes.gpu_board(*vram_gib, memory_gib=host_gib)
    if capabilities:
        cards = zip(board.gpus, capabilities, strict=True)
        board = replace(board, gpus=tuple(replace(gpu, compute_capability=each) for gpu, each in cards))
    memory = shapes.memory(board, gpu_gib=tuple(size * 0.97 for size in vram_gib))
    asked = Preset(**{"reserve": "max(512MiB, 5%)", "partial_offload": True, "fallback": "cpu", **preset})  # type: ignore[arg-type]
    models = {"m": (it, ModelConfig("m", "m"))}
    return make_plan(board, memory, Profile("test", "", asked), shapes.engine(cuda=True), models, EnvFacts("/h", "/c"))


def chosen(plan: Plan) -> LaunchPlan:
    ladder = plan.models["m"].ladder
    return ladder.plans[ladder.chosen]


def quality(plan: Plan) -> tuple[float, ...]:
    """Larger is better: layers on the GPUs, experts there, context of a request, KV type, slots."""
    it: Settings = chosen(plan).settings
    kv = {"f16": 3, "q8_0": 2, "q4_0": 1}[it.kv_type_k]
    return (it.n_gpu_layers, -it.cpu_expert_layers, it.n_ctx // it.n_parallel, kv, it.n_parallel)


def test_case_01_a_third_small_card_takes_nothing_from_two_large_ones() -> None:
    it = candidate_of(shapes.model("Llama-70B", LLAMA_70B))
    two = planned(it, 24, 24, n_ctx=8192)
    three = planned(it, 24, 24, 4, n_ctx=8192)
    assert quality(three) >= quality(two)
    assert chosen(two).settings.n_gpu_layers == 81


def test_case_01_a_card_that_cannot_pay_is_left_out_and_named() -> None:
    it = candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B))
    plan = planned(it, 2, 24, n_ctx=8192)
    rung = chosen(plan)
    assert rung.settings.n_gpu_layers == 57
    assert rung.env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert set(rung.budget) == {"host", "GPU-1"}
    (reason,) = [reason for reason in rung.reasons if reason.subject == "gpus"]
    assert reason.value == "GPU 1" and "without GPU 0" in reason.because


@pytest.mark.parametrize(
    ("cards", "model", "n_ctx", "layers"),
    [
        ((24, 24), "70B", 8192, 81),
        ((24, 24, 4), "70B", 8192, 81),
        ((4, 24, 24), "70B", 8192, 81),
        ((24, 4, 24, 2), "70B", 8192, 81),
        ((4, 24), "22B", 16384, 57),
        ((24, 4), "22B", 16384, 57),
        ((2, 24), "22B", 8192, 57),
    ],
)
def test_case_01_every_layer_stays_on_the_gpus(cards: tuple[float, ...], model: str, n_ctx: int, layers: int) -> None:
    """As reported: a 4 GB card beside two of 24 GB took 11 of 81 layers off the GPU; its place in the order is none."""
    meta = LLAMA_70B if model == "70B" else CODESTRAL_22B
    plan = planned(candidate_of(shapes.model("Reported", meta)), *cards, host_gib=128, n_ctx=n_ctx)
    assert chosen(plan).settings.n_gpu_layers == layers
    assert chosen(plan).settings.n_ctx == n_ctx


def test_a_share_of_zero_pays_for_nothing() -> None:
    it = candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B))
    rung = chosen(planned(it, 24, 24, n_ctx=8192, tensor_split=(0.0, 1.0)))
    assert set(rung.budget) == {"host", "GPU-1"}
    assert rung.settings.devices == ("CUDA0",)
    assert rung.env["CUDA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize(
    ("split", "used"),
    [((1.0, 0.0), {"GPU-0"}), ((0.0, 1.0, 1.0), {"GPU-1", "GPU-2"}), ((1.0, 0.0, 1.0), {"GPU-0", "GPU-2"})],
)
def test_no_share_of_zero_pays_wherever_it_stands(split: tuple[float, ...], used: set[str]) -> None:
    it = candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B))
    rung = chosen(planned(it, *[24.0] * len(split), n_ctx=8192, tensor_split=split))
    assert set(rung.budget) == {"host", *used}


def test_given_shares_are_kept() -> None:
    it = candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B))
    rung = chosen(planned(it, 24, 24, n_ctx=8192, tensor_split=(3.0, 1.0)))
    assert rung.settings.tensor_split == (3.0, 1.0)
    assert rung.budget["GPU-0"].weights_bytes > 2 * rung.budget["GPU-1"].weights_bytes


def test_a_model_may_name_its_gpus() -> None:
    it = candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B))
    board = shapes.gpu_board(24, 24)
    models = {name: (it, ModelConfig(name, name, set={"gpus": (index,)})) for name, index in (("a", "1"), ("b", "0"))}
    asked = Profile("test", "", Preset(n_ctx=4096))
    plan = make_plan(board, shapes.memory(board), asked, shapes.engine(cuda=True), models, EnvFacts("/h", "/c"))
    used = {
        name: model.ladder.plans[model.ladder.chosen].env["CUDA_VISIBLE_DEVICES"] for name, model in plan.models.items()
    }
    assert used == {"a": "GPU-1", "b": "GPU-0"}
    assert plan.models["b"].warnings == ()


def test_case_01_a_card_that_the_engine_has_no_code_for_is_left_out() -> None:
    board = shapes.gpu_board(2, 24)
    board = replace(board, gpus=(replace(board.gpus[0], compute_capability="3.5"), board.gpus[1]))
    models = {"m": (candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B)), ModelConfig("m", "m"))}
    asked = Profile("test", "", Preset(n_ctx=4096, backend="cuda"))
    for engine in (shapes.engine(cuda=True), assumed_engine(board, "cuda", "/e/llama-server")):
        plan = make_plan(board, shapes.memory(board), asked, engine, models, EnvFacts("/h", "/c"))
        assert chosen(plan).env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
        assert any(note.startswith("GPU 0 is left out") for note in plan.notes)


def test_instances_of_mig_are_never_combined() -> None:
    board = shapes.gpu_board(24, 24)
    board = replace(board, gpus=tuple(replace(gpu, uuid=f"MIG-{i}") for i, gpu in enumerate(board.gpus)))
    models = {"m": (candidate_of(shapes.model("Llama-70B", LLAMA_70B)), ModelConfig("m", "m"))}
    asked = Profile("test", "", Preset(n_ctx=4096, partial_offload=True))
    plan = make_plan(board, shapes.memory(board), asked, shapes.engine(cuda=True), models, EnvFacts("/h", "/c"))
    assert chosen(plan).settings.devices == ("CUDA0",)
    assert 0 < chosen(plan).settings.n_gpu_layers < 81


def test_row_split_uses_every_gpu() -> None:
    it = candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B))
    assert set(chosen(planned(it, 24, 24, n_ctx=8192, split_mode="row")).budget) == {"host", "GPU-0", "GPU-1"}


def test_of_two_cards_that_are_enough_the_newer_one_is_taken() -> None:
    it = candidate_of(shapes.model("Small", shapes.meta(layers=8)))
    board = shapes.gpu_board(24, 12)
    board = replace(board, gpus=(replace(board.gpus[0], compute_capability="7.5"), board.gpus[1]))
    asked = Profile("test", "", Preset(n_ctx=4096))
    models = {"m": (it, ModelConfig("m", "m"))}
    plan = make_plan(board, shapes.memory(board), asked, shapes.engine(cuda=True), models, EnvFacts("/h", "/c"))
    assert chosen(plan).env["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_experts_of_the_last_layers_leave_before_whole_layers() -> None:
    it = experts()
    size = sum(it.weights.by_layer) / GIB
    rung = chosen(planned(it, size * 0.75, n_ctx=8192))
    assert rung.settings.n_gpu_layers == 49, "attention of every layer stays on the GPU"
    assert 0 < rung.settings.cpu_expert_layers < 48
    pattern = rung.argv[rung.argv.index("--override-tensor") + 1]
    first = 48 - rung.settings.cpu_expert_layers
    assert pattern == rf"blk\.({'|'.join(map(str, range(first, 48)))})\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    assert rung.settings.load_mode == "mmap"
    moved = sum(it.weights.experts[first:])
    assert rung.budget["host"].weights_bytes == it.weights.input_bytes + moved
    assert any(reason.subject == "cpu_experts" for reason in rung.reasons)


def with_args(it: Candidate, vram_gib: float, *args: str) -> LaunchPlan:
    """The plan for an engine that has the options of `args`, and the reason that it gives for them."""
    board, engine = shapes.gpu_board(vram_gib, memory_gib=64), shapes.engine(cuda=True)
    flags = {name: Flag(name, 0 if name in ("--cpu-moe", "-cmoe") else 1) for name in args if name.startswith("-")}
    engine = replace(engine, flags=engine.flags | flags)
    asked = Profile("test", "", Preset(n_ctx=8192, partial_offload=True, args=args))
    models = {"m": (it, ModelConfig("m", "m"))}
    return chosen(make_plan(board, shapes.memory(board), asked, engine, models, EnvFacts("/h", "/c")))


@pytest.mark.parametrize(
    ("args", "layers"),
    [(("--n-cpu-moe", "12"), 12), (("-ncmoe", "12", "-ncmoe", "4"), 12), (("--cpu-moe",), 48), (("-ncmoe", "99"), 48)],
)
def test_experts_that_args_keep_on_the_host_are_counted_there(args: tuple[str, ...], layers: int) -> None:
    it = experts()
    rung, plain = with_args(it, 80, *args), with_args(it, 80)
    moved = sum(it.weights.experts[:layers])
    assert rung.settings.n_gpu_layers == 49 and not rung.settings.cpu_expert_layers
    assert rung.budget["host"].weights_bytes == plain.budget["host"].weights_bytes + moved
    assert rung.budget["GPU-0"].weights_bytes == plain.budget["GPU-0"].weights_bytes - moved
    copied = rung.budget["GPU-0"].compute_bytes - plain.budget["GPU-0"].compute_bytes
    assert copied == it.weights.largest_bytes, "the GPU computes them for a large batch, from a copy"


def test_experts_on_the_host_by_args_make_a_small_card_fit() -> None:
    """The plan keeps experts of the last layers there, so that both together are what the card lacks."""
    it = experts()
    size = sum(it.weights.by_layer) / GIB * 0.75
    whole, part, own = (with_args(it, size, *args) for args in (("--cpu-moe",), ("--n-cpu-moe", "4"), ()))
    assert [each.settings.n_gpu_layers for each in (whole, part, own)] == [49, 49, 49]
    assert whole.settings.cpu_expert_layers == 0
    assert part.settings.cpu_expert_layers + 4 == own.settings.cpu_expert_layers


def test_dense_layers_that_args_keep_on_the_host_are_counted_there() -> None:
    tensors = tuple(replace(each, name=each.name.replace(".all.", ".ffn_up.")) for each in LLAMA_70B.tensors)
    it = candidate_of(shapes.model("70B", replace(LLAMA_70B, tensors=tensors)))
    rung, plain = with_args(it, 80, "--n-cpu-ffn", "8"), with_args(it, 80)
    moved = sum(it.weights.by_layer[:8])
    assert moved > GIB
    assert rung.budget["host"].weights_bytes == plain.budget["host"].weights_bytes + moved
    (reason,) = (each for each in rung.reasons if each.subject == "args")
    assert "layers kept on the CPU are counted" in reason.because


def test_an_engine_without_override_tensor_moves_whole_layers() -> None:
    it = experts()
    board = shapes.gpu_board(sum(it.weights.by_layer) / GIB * 0.75, memory_gib=64)
    engine = shapes.engine(cuda=True)
    engine = replace(
        engine, flags={name: flag for name, flag in engine.flags.items() if name not in ("-ot", "--override-tensor")}
    )
    asked = Profile("test", "", Preset(n_ctx=8192, partial_offload=True))
    plan = make_plan(
        board, shapes.memory(board), asked, engine, {"m": (it, ModelConfig("m", "m"))}, EnvFacts("/h", "/c")
    )
    assert 0 < chosen(plan).settings.n_gpu_layers < 49
    assert "--override-tensor" not in chosen(plan).argv


MODELS = [
    candidate_of(shapes.model("Llama-70B", LLAMA_70B)),
    candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B)),
    candidate_of(shapes.model("8B", shapes.meta())),
    candidate_of(
        shapes.model("Gemma-12B", shapes.meta("gemma3", layers=48, embd=3840, ff=15360, window=1024, tied=True))
    ),
    experts(),
]


def test_a_small_card_pays_for_its_context_where_the_kv_cache_is_quantized() -> None:
    """The large card alone lacks 0.2 GiB. Both need more bytes than it lacks with f16, and have more room."""
    plan = planned(MODELS[0], 2.0, 44.5, n_ctx=4096)
    assert quality(plan) == (81, 0, 4096, 2, 1)
    assert set(chosen(plan).budget) == {"host", "GPU-0", "GPU-1"}
    alone = planned(MODELS[0], 44.5, n_ctx=4096)
    assert quality(alone) == (79, 0, 4096, 2, 1)


def test_a_smaller_cache_is_a_step_down_though_it_fits_one_card_of_two() -> None:
    """One card is fuller than both were: compared by room, a start out of memory had no smaller plan to go to."""
    it = candidate_of(shapes.model("Codestral-22B", CODESTRAL_22B))
    plans = planned(it, 24, 24, n_ctx=32768, partial_offload=False, fallback="refuse").models["m"].ladder.plans
    assert [(each.settings.kv_type_k, len(each.settings.devices)) for each in plans[:2]] == [("f16", 2), ("q8_0", 1)]
    assert len({each.settings.n_ctx for each in plans}) > 1


def test_the_prompt_cache_is_given_up_where_only_the_host_is_full() -> None:
    """It takes no byte of a GPU: a host of 2 GB beside a card of 24 GB was refused for it."""
    it = candidate_of(shapes.model("8B", shapes.meta()))
    small, enough = (planned(it, 24, host_gib=size, n_ctx=4096, cache_ram=GIB, fallback="refuse") for size in (2, 4))
    assert (quality(small)[0], chosen(small).settings.cache_ram_bytes) == (33, 0)
    assert (quality(enough)[0], chosen(enough).settings.cache_ram_bytes) == (33, GIB)


def test_experts_stay_on_the_host_before_the_output_does() -> None:
    """Copies of what the host keeps take more, on three GPUs, than the experts of one layer free; each has room."""
    plan = planned(experts(), 8.0, 8.0, 8.0, host_gib=200, n_ctx=4096, partial_offload=True, fallback="refuse")
    assert quality(plan)[:2] == (49, -3)


CARDS = st.tuples(st.floats(1.5, 80), st.sampled_from(["7.5", "8.6", "8.9", "9.0"]), st.booleans())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(MODELS),
    st.lists(CARDS, min_size=2, max_size=7),
    st.floats(16, 200),
    st.sampled_from([4096, 32768, 131072]),
    st.integers(1, 4),
    st.booleans(),
)
@example(MODELS[0], [(2.0, "8.9", True), (44.5, "8.9", False)], 200, 4096, 1, True)
def test_more_gpus_never_make_a_plan_worse(
    it: Candidate, machine: list[tuple[float, str, bool]], host_gib: float, n_ctx: int, slots: int, partial: bool
) -> None:
    """For every subset of the GPUs: layers, experts, context, KV type and slots. Of more than four GPUs: for each one,
    all but each one, and one subset that was drawn."""
    preset = {"n_ctx": n_ctx, "n_parallel": slots, "partial_offload": partial, "fallback": "refuse"}

    def of(cards: tuple[int, ...]) -> tuple[float, ...] | None:
        sizes, capabilities = [machine[i][0] for i in cards], [machine[i][1] for i in cards]
        try:
            plan = planned(it, *sizes, host_gib=host_gib, capabilities=capabilities, **preset)
        except DoesNotFitError:
            return None
        return quality(plan)

    every = tuple(range(len(machine)))
    counts = range(1, len(every)) if len(every) <= 4 else (1, len(every) - 1)
    subsets = {cards for count in counts for cards in combinations(every, count)}
    subsets |= {drawn} if (drawn := tuple(i for i in every if machine[i][2])) else set()
    whole = of(every)
    for cards in sorted(subsets):
        part = of(cards)
        if part is not None:
            assert whole is not None and whole >= part, (cards, whole, part)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from(MODELS),
    st.lists(st.tuples(st.sampled_from([6.0, 12.0, 20.0, 24.0, 48.0]), st.booleans()), min_size=2, max_size=5),
    st.sampled_from([4096, 32768]),
    st.booleans(),
)
def test_instances_of_mig_beside_cards_never_make_a_plan_worse(
    it: Candidate, machine: list[tuple[float, bool]], n_ctx: int, partial: bool
) -> None:
    """One process uses one instance, and none beside a card; each subset of cards and instances is a machine."""

    def of(cards: tuple[int, ...]) -> tuple[float, ...] | None:
        board = shapes.gpu_board(*(machine[i][0] for i in cards), memory_gib=200)
        names = [f"MIG-{i}" if machine[i][1] else f"GPU-{i}" for i in cards]
        named = zip(board.gpus, names, strict=True)
        board = replace(board, gpus=tuple(replace(gpu, uuid=name) for gpu, name in named))
        asked = Preset(n_ctx=n_ctx, partial_offload=partial, fallback="refuse", reserve="max(512MiB, 5%)")
        models = {"m": (it, ModelConfig("m", "m"))}
        engine, profile = shapes.engine(cuda=True), Profile("test", "", asked)
        try:
            plan = make_plan(board, shapes.memory(board), profile, engine, models, EnvFacts("/h", "/c"))
        except DoesNotFitError:
            return None
        used = chosen(plan).env["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(used) == 1 or not any(name.startswith("MIG-") for name in used), used
        return quality(plan)

    every = tuple(range(len(machine)))
    whole = of(every)
    for index in every:
        part = of(tuple(i for i in every if i != index))
        assert part is None or (whole is not None and whole >= part), (index, whole, part)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), st.lists(st.floats(4, 80), min_size=2, max_size=4), st.sampled_from([4096, 32768]))
def test_layers_are_divided_as_llama_cpp_divides_them(it: Candidate, vram_gib: list[float], n_ctx: int) -> None:
    """llama-model.cpp: the device of layer i is the first whose cumulative share is above (i - first) / count."""
    try:
        rung = chosen(planned(it, *vram_gib, host_gib=200, n_ctx=n_ctx))
    except DoesNotFitError:
        return
    split, count = rung.settings.tensor_split, rung.settings.n_gpu_layers
    if not split:
        return
    total, reached, ends = sum(split), 0.0, []
    for share in split:
        reached += share
        ends.append(reached / total)
    counts = [0] * len(split)
    for index in range(count):
        counts[next(device for device, end in enumerate(ends) if end > index / count)] += 1
    assert counts == [int(share) for share in split]


@pytest.mark.parametrize("cards", [8, 12])
def test_many_equal_gpus_are_planned_quickly(cards: int) -> None:
    it = candidate_of(shapes.model("Llama-70B", LLAMA_70B))
    rung = chosen(planned(it, *([24.0] * cards), n_ctx=32768))
    assert rung.settings.n_gpu_layers == 81
    assert len(rung.settings.devices) < cards
