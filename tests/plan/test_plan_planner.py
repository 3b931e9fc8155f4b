"""make_plan: field cases, several models, fallbacks, and the refusal that says what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge.board.memory import MemorySnapshot, snapshot
from edge.board.probe import probe
from edge.config.profile import load_profile, resolve_tier
from edge.config.values import ModelConfig, Preset, Profile
from edge.engine.engine import Acceleration, Engine
from edge.errors import DoesNotFitError, EngineMissingError, ModelMissingError, UnavailableError
from edge.models.open import ModelFile
from edge.paths import folders
from edge.plan.argv import EnvFacts
from edge.plan.calibration import Calibration, calibration_key
from edge.plan.choices import LoadChoice, size_class
from edge.plan.inputs import Candidate, candidate_of
from edge.plan.plan import DomainBudget, LaunchPlan, Measured, Plan
from edge.plan.planner import Extras, make_plan
from edge.units import GIB, MIB
from tests.plan import shapes
from tests.trees import trees

FACTS = EnvFacts("/home/e", "/var/cache/edgellm")
SMALL = shapes.meta(layers=28, embd=2560, heads=20, ff=9728, vocab=151_936, ctx=40960)
TINY = shapes.meta(layers=16, embd=1024, heads=8, kv_heads=4, ff=4096, vocab=50_000)


def profile(**preset: Any) -> Profile:
    return Profile("test", "", Preset(**preset))


def plan(
    board: shapes.Board,
    *,
    preset: Profile | None = None,
    engine: Engine | None = None,
    memory: MemorySnapshot | None = None,
    models: dict[str, tuple[Candidate, ModelConfig]] | None = None,
    extras: Extras | None = None,
) -> Plan:
    cuda = bool(board.gpus)
    return make_plan(
        board,
        memory or shapes.memory(board),
        preset or profile(),
        engine or shapes.engine(cuda=cuda),
        models or one(),
        FACTS,
        extras,
    )


def one(file: ModelFile | None = None, **config: Any) -> dict[str, tuple[Candidate, ModelConfig]]:
    return {"chat": (candidate_of(file or shapes.model("Small", SMALL)), ModelConfig("chat", "Small", **config))}


def chosen(found: Plan, model_id: str = "chat") -> LaunchPlan:
    ladder = found.models[model_id].ladder
    return ladder.plans[ladder.chosen]


def gpus(rung: LaunchPlan) -> list[DomainBudget]:
    return [domain for name, domain in rung.budget.items() if name.startswith("GPU")]


def why(found: LaunchPlan, subject: str) -> tuple[str, str, str]:
    reason = next(reason for reason in found.reasons if reason.subject == subject)
    return reason.value, reason.because, reason.origin


def test_every_setting_has_a_reason_and_its_origin(tmp_path: Path) -> None:
    board = shapes.jetson(7.4)
    orin = resolve_tier(load_profile("orin", folders({}, tmp_path)), board)
    rung = chosen(plan(board, preset=orin))
    assert why(rung, "n_ctx") == (
        "16384",
        "as requested; the model was trained for 40960",
        "profile orin, tier 8GB",
    )
    assert why(rung, "n_gpu_layers") == ("29/29", "everything on CUDA0", "planner")
    assert why(rung, "load_mode")[:2] == ("none", "all weights go to the GPU: a mapping would keep them twice")
    subjects = {reason.subject for reason in rung.reasons}
    assert {"model", "n_ctx", "n_parallel", "n_gpu_layers", "kv_type", "flash_attention", "load_mode"} <= subjects
    assert {"n_threads", "cache_ram"} <= subjects


@pytest.mark.parametrize("free_kb", [300_000, 5_900_000])
def test_fc_17_a_full_page_cache_changes_nothing(free_kb: int, tmp_path: Path) -> None:
    """FC-17: what counts is MemAvailable. The same plan before and after a model was downloaded."""
    root = trees.copy("orin-nano-8", tmp_path)
    cached = 6_100_000 - free_kb
    text = (
        f"MemTotal: 7802736 kB\nMemFree: {free_kb} kB\nMemAvailable: 6200000 kB\n"
        f"Buffers: 0 kB\nCached: {cached} kB\nSwapTotal: 3901352 kB\nSwapFree: 3901352 kB\n"
    )
    trees.write(root, "proc/meminfo", text)
    board = probe(root)
    rung = chosen(plan(board, memory=snapshot(root, board)))
    assert rung.budget["unified"].available_bytes == 6_200_000 * 1024
    assert (rung.rung, rung.settings.n_ctx, rung.settings.kv_type_k) == (0, 8192, "f16")


def test_fc_17_without_memavailable_the_estimate_counts_cache_but_not_swap(tmp_path: Path) -> None:
    """FC-17: an old kernel's meminfo."""
    root = trees.copy("orin-nano-8", tmp_path)
    trees.write(
        root,
        "proc/meminfo",
        "MemTotal: 7802736 kB\nMemFree: 300000 kB\nBuffers: 0 kB\nCached: 5800000 kB\nSwapTotal: 3901352 kB\n",
    )
    board = probe(root)
    found = plan(board, memory=snapshot(root, board), models=one(shapes.model("Tiny", TINY)))
    available = chosen(found).budget["unified"].available_bytes
    assert 300_000 * 1024 < available < 6_100_000 * 1024
    assert any("MemAvailable" in note for note in found.notes)


@pytest.mark.parametrize("requested", ["auto", "none", "mmap", "dio"])
@pytest.mark.parametrize("vram_gib", [24, 3])
def test_fc_19_without_mmap_only_when_every_layer_leaves_the_host(requested: str, vram_gib: float) -> None:
    """FC-19: direct I/O with layers left on the host got a server killed; the mode is decided by the plan."""
    board = shapes.gpu_board(vram_gib)
    preset = profile(load_mode=requested, partial_offload=True, split_mode="none", kv_type_min="f16")
    rung = chosen(plan(board, preset=preset))
    full = rung.settings.n_gpu_layers == 29
    assert full == (vram_gib == 24)
    if not full:
        assert rung.settings.load_mode == "mmap"
        assert "stays on the host" in why(rung, "load_mode")[1] or requested == "mmap"
    else:
        assert rung.settings.load_mode == ("mmap" if requested == "auto" else requested)
    assert ("--load-mode", rung.settings.load_mode) in zip(rung.argv, rung.argv[1:], strict=False)


def test_the_load_mode_where_nothing_was_measured() -> None:
    """A mapping is sooner for a discrete GPU; on unified memory it would stand beside what the GPU has."""
    gpu = shapes.gpu_board(24)
    assert chosen(plan(gpu)).settings.load_mode == "mmap"
    assert "sooner ready from a mapped file" in why(chosen(plan(gpu)), "load_mode")[1]
    assert chosen(plan(replace(gpu, container="wsl2"))).settings.load_mode == "none"
    assert chosen(plan(shapes.jetson(30))).settings.load_mode == "none"


def measured(mode: str, cold_mode: str, offload: str = "full") -> Extras:
    """What `edgellm bench load --apply` keeps for the model of these tests: 3 GB."""
    found = LoadChoice("x86_64", "e", "/", size_class(one()["chat"][0].weights.file_bytes), offload, mode, 1.0)
    return Extras(load_choices=(replace(found, cold_mode=cold_mode, cold_below=0.16),))


def test_a_start_that_finds_nothing_in_the_page_cache_has_a_load_mode_of_its_own() -> None:
    rung = chosen(plan(shapes.gpu_board(24), extras=measured("mmap", "dio")))
    assert rung.cold is not None and (rung.cold.load_mode, rung.cold.below) == ("dio", 0.16)
    assert ("--load-mode", "mmap") in zip(rung.argv, rung.argv[1:], strict=False)
    assert rung.cold.argv == tuple("dio" if word == "mmap" else word for word in rung.argv), "else the same command"
    assert [rung.argv_at(at) is rung.cold.argv for at in (0.0, 0.15, 0.16, 1.0, None)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert why(rung, "load_mode, cold")[:2] == (
        "dio",
        "while less than 16% of the file is in the page cache: measured by `edgellm bench load`",
    )
    assert rung.settings.load_mode == "mmap", "memory is planned for the usual one"


@pytest.mark.parametrize(
    ("board", "preset", "offload"),
    [
        (shapes.gpu_board(24), profile(load_mode="mmap"), "full"),  # the operator's own
        (shapes.gpu_board(3), profile(partial_offload=True, kv_type_min="f16", split_mode="none"), "partial"),
        (shapes.jetson(30), profile(), "full"),  # unified memory: the mode decides how much is taken
        (shapes.cpu_board(), profile(), "none"),
    ],
)
def test_no_other_start_changes_its_load_mode(board: shapes.Board, preset: Profile, offload: str) -> None:
    for mode, cold_mode in (("mmap", "dio"), ("none", "dio")):
        rung = chosen(plan(board, preset=preset, extras=measured(mode, cold_mode, offload)))
        assert rung.cold is None and rung.argv_at(0.0) == rung.argv


def test_a_cold_start_takes_no_mode_whose_buffers_do_not_fit() -> None:
    board = shapes.gpu_board(24, memory_gib=8)
    rung = chosen(plan(board, extras=measured("mmap", "dio")))
    host = rung.budget["host"]
    tight = int(host.required_bytes + host.reserve_bytes + 100 * MIB)  # dio stages 256 MiB
    memory = replace(shapes.memory(board), available_bytes=shapes.memory(board).available_bytes | {"host": tight})
    rung = chosen(plan(board, memory=memory, extras=measured("mmap", "dio")))
    assert rung.fits and rung.cold is None


def test_fc_20_the_prompt_cache_is_bounded_and_paid_for(tmp_path: Path) -> None:
    """FC-20: left alone, the engine keeps up to 8 GiB of prompts in host memory: more than this board has."""
    board = shapes.jetson(7.4)
    orin = resolve_tier(load_profile("orin", folders({}, tmp_path)), board)
    rung = chosen(plan(board, preset=orin))
    assert rung.argv[rung.argv.index("--cache-ram") + 1] == "128"
    assert rung.budget["unified"].prompt_cache_bytes == 128 * MIB
    old = plan(board, preset=orin, engine=shapes.engine(cuda=True, era="flash-bare"))
    assert "--cache-ram" not in chosen(old).argv
    assert any(warning.startswith("--cache-ram 128") for warning in old.models["chat"].warnings)


def test_fc_20_checkpoints_of_a_hybrid_model_are_bounded_and_paid_for() -> None:
    """FC-20's sibling: 32 snapshots of a recurrent state are gigabytes that no cache limit covers."""
    keys = {"ssm.state_size": 128, "ssm.inner_size": 6144, "ssm.conv_kernel": 4, "ssm.group_count": 16}
    header = shapes.meta("qwen35", layers=64, kv_heads=4, head_size=256, ff=4096, extra=keys)
    rung = chosen(plan(shapes.jetson(61), models=one(shapes.model("Hybrid", header)), preset=profile(cache_ram=GIB)))
    settings = rung.settings
    assert rung.argv[rung.argv.index("--ctx-checkpoints") + 1] == str(settings.ctx_checkpoints)
    assert 1 <= settings.ctx_checkpoints <= 4
    assert GIB - MIB <= rung.budget["unified"].prompt_cache_bytes <= GIB


@pytest.mark.parametrize(("era", "known"), [("load-mode", True), ("both", True), ("flash-bare", False)])
def test_fc_23_the_engine_may_not_change_the_plan(era: str, known: bool) -> None:
    """FC-23: left alone, the engine shrinks the context and moves layers to the CPU by its own reading of memory."""
    rung = chosen(plan(shapes.jetson(16), engine=shapes.engine(cuda=True, era=era)))
    pairs = list(zip(rung.argv, rung.argv[1:], strict=False))
    assert (("--fit", "off") in pairs) == known
    assert ("--ctx-size", str(rung.settings.n_ctx)) in pairs
    assert ("--n-gpu-layers", "29") in pairs


def test_fc_22_the_context_is_always_given_and_never_above_the_trained_one() -> None:
    """FC-22: unset, the engine takes the trained context of 131072 tokens."""
    for requested, wanted in ((0, 40960), (1_000_000, 40960), (4096, 4096)):
        rung = chosen(plan(shapes.cpu_board(32), preset=profile(offload="none", n_ctx=requested)))
        assert rung.argv[rung.argv.index("--ctx-size") + 1] == str(wanted)
    rung = chosen(plan(shapes.cpu_board(32), preset=profile(offload="none", n_ctx=0)))
    assert why(rung, "n_ctx")[1] == "all that the model was trained for"


def test_fc_88_a_file_without_a_chat_template_is_a_warning_only_where_it_shall_chat() -> None:
    board = shapes.jetson(30)
    base = shapes.model("Base", replace(SMALL, chat_template=False))
    (warning,) = plan(board, models=one(base)).models["chat"].warnings
    assert "no chat template" in warning
    assert plan(board).models["chat"].warnings == ()
    assert plan(board, models=one(base, role="embedding")).models["chat"].warnings == ()


def test_threads_leave_the_cores_to_others_that_they_keep_busy() -> None:
    board = shapes.cpu_board(cores=8)
    found = plan(board, extras=Extras(busy_cores=3))
    assert found.models["chat"].ladder.plans[0].settings.n_threads == 5
    because = "one for each of 8 physical cores, less 3 that other processes keep busy"
    assert why(chosen(found), "n_threads")[:2] == ("5", because)
    requested = plan(board, preset=profile(n_threads=8), extras=Extras(busy_cores=3))
    assert why(chosen(requested), "n_threads")[:2] == ("8", "as requested")
    quota = replace(board, cpu=replace(board.cpu, usable_cores=2))
    within = plan(quota, extras=Extras(busy_cores=1))  # the load of the whole machine says nothing within a quota
    assert why(chosen(within), "n_threads")[:2] == ("2", "one for each of 2 usable cores")


def test_a_smaller_plan_says_what_it_gave_up() -> None:
    board = shapes.jetson(7.4)
    found = plan(board, memory=shapes.memory(board, 4.6), preset=profile(n_ctx=32768))
    rung = chosen(found)
    assert rung.rung > 0
    assert why(rung, "kv_type") == ("q8_0", "a smaller cache, so that it fits", "planner")
    assert "less than the 32768 requested, so that it fits" in why(rung, "n_ctx")[1]
    assert rung.fits
    assert not found.models["chat"].ladder.plans[rung.rung - 1].fits


def test_a_smaller_quantization_that_is_here_becomes_a_rung() -> None:
    large = shapes.model("Big", shapes.meta())
    small = shapes.model("Big", shapes.meta(quant="Q4_K_M"))
    board = shapes.jetson(16)
    extras = Extras(alternatives={"chat": [candidate_of(small)]})
    found = plan(board, models=one(large), memory=shapes.memory(board, 7.4), extras=extras)
    rung = chosen(found)
    assert rung.model is small
    assert "because Big Q5_K_M does not fit" in why(rung, "model")[1]
    assert small.path in rung.argv
    assert found.models["chat"].model is large


def test_nothing_fits_says_what_is_missing_and_three_ways_out() -> None:
    board = shapes.jetson(7.4)
    with pytest.raises(DoesNotFitError) as caught:
        plan(board, models=one(shapes.model("Big", shapes.meta())), memory=shapes.memory(board, 6.3))
    error = caught.value
    assert error.exit_code == 75
    assert str(error).startswith("chat (Big Q5_K_M) does not fit: even with 4096 tokens of context ")
    assert str(error).endswith("of unified memory are missing")
    assert error.table is not None
    lines = error.table.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *("weights", "kv", "compute", "context", "prompt", "page", "required", "reserve", "available", "headroom"),
    ]
    assert error.hint is not None
    assert len(error.hint.split("; or ")) == 3


def test_a_missing_backend_is_refused_unless_the_profile_allows_the_cpu() -> None:
    board, engine = shapes.jetson(16), shapes.engine()
    with pytest.raises(EngineMissingError) as caught:
        plan(board, engine=engine, preset=profile(backend="cuda", recipe="orin"))
    assert "has no CUDA" in str(caught.value)
    assert "edgellm build -p orin" in str(caught.value.hint)
    found = plan(board, engine=engine, preset=profile(backend="cuda", fallback="cpu"))
    assert chosen(found).settings.n_gpu_layers == 0
    assert any("so the CPU serves" in note for note in found.notes)


def test_what_crashed_at_the_proof_is_off_in_every_plan() -> None:
    repack = Acceleration("repacked weights", ("--no-repack",), {}, "slower prompts")
    flash = Acceleration("flash attention", ("--flash-attn", "off"), {}, "no quantized V cache")
    graphs = Acceleration("CUDA graphs", (), {"GGML_CUDA_DISABLE_GRAPHS": "1"}, "slower")
    engine = replace(shapes.engine(), without=(repack, flash, graphs))
    found = plan(shapes.cpu_board(), preset=profile(kv_type_k="q8_0", kv_type_v="q8_0"), engine=engine)
    launch = chosen(found)
    assert "--no-repack" in launch.argv and launch.argv.count("--flash-attn") == 1
    assert (launch.settings.flash_attention, launch.settings.kv_type_v) == ("off", "f16")
    assert launch.env["GGML_CUDA_DISABLE_GRAPHS"] == "1"
    assert any("without repacked weights" in note for note in found.notes)


def test_no_model_says_how_to_get_one() -> None:
    with pytest.raises(ModelMissingError, match="no model to plan"):
        make_plan(shapes.cpu_board(), shapes.memory(shapes.cpu_board()), profile(), shapes.engine(), {}, FACTS)


def test_models_share_the_memory_in_the_order_of_their_priority() -> None:
    board = shapes.cpu_board(32)
    first, second = candidate_of(shapes.model("A", SMALL)), candidate_of(shapes.model("B", TINY))
    models = {
        "b": (second, ModelConfig("b", "B")),
        "a": (first, ModelConfig("a", "A", priority=1)),
    }
    found = plan(board, models=models, preset=profile(offload="none"))
    assert list(found.models) == ["b", "a"]
    a, b = chosen(found, "a").budget["host"], chosen(found, "b").budget["host"]
    assert b.available_bytes == a.available_bytes - a.required_bytes
    assert a.required_bytes + b.required_bytes + a.reserve_bytes <= a.available_bytes


def test_a_model_that_fits_only_alone_takes_turns() -> None:
    board = shapes.cpu_board(8)
    models = {name: (candidate_of(shapes.model(name, SMALL)), ModelConfig(name, name)) for name in ("a", "b")}
    found = plan(board, models=models, memory=shapes.memory(board, 5.5), preset=profile(offload="none"))
    assert found.models["a"].warnings == ()
    assert found.models["b"].warnings == ("fits only while a sleep: they take turns",)
    assert chosen(found, "b").budget["host"].available_bytes == chosen(found, "a").budget["host"].available_bytes


@pytest.mark.parametrize(
    ("pinned", "warning"),
    [
        ("a", "does not fit beside a (pinned): its requests are refused while that is in memory"),
        ("c", "fits only while a sleep: they take turns"),
    ],
)
def test_a_model_that_cannot_fit_beside_a_pinned_one_is_not_said_to_take_turns(pinned: str, warning: str) -> None:
    board = shapes.cpu_board(8)
    models = {
        name: (candidate_of(shapes.model(name, size)), ModelConfig(name, name, priority=rank, pin=name == pinned))
        for name, size, rank in (("a", SMALL, 2), ("c", TINY, 1), ("b", SMALL, 0))
    }
    found = plan(board, models=models, memory=shapes.memory(board, 6.5), preset=profile(offload="none"))
    assert not found.models["c"].takes_turns
    assert (found.models["b"].takes_turns, found.models["b"].warnings) == (True, (warning,))


def test_a_pinned_model_that_is_planned_later_leaves_no_room_either() -> None:
    board = shapes.cpu_board(8)
    models = {
        name: (candidate_of(shapes.model(name, SMALL)), ModelConfig(name, name, priority=rank, pin=name == "last"))
        for name, rank in (("a", 2), ("b", 1), ("last", 0))
    }
    found = plan(board, models=models, memory=shapes.memory(board, 6.5), preset=profile(offload="none"))
    assert found.models["b"].warnings == (
        "does not fit beside last (pinned): its requests are refused while that is in memory",
    )
    assert found.models["last"].warnings == ("fits only while a and b sleep: they take turns",)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_model_that_takes_turns_is_planned_for_what_pinned_ones_leave(rank: int) -> None:
    """Whether the pinned one is planned first or last: planned for all memory its requests would be refused."""
    board = shapes.cpu_board(8)
    models = {
        name: (candidate_of(shapes.model(name, size)), ModelConfig(name, name, priority=order, pin=name == "pinned"))
        for name, size, order in (("first", SMALL, 1), ("turns", SMALL, 0), ("pinned", TINY, rank))
    }
    found = plan(board, models=models, memory=shapes.memory(board, 6.5), preset=profile(offload="none"))
    first, turns, pinned = (chosen(found, name).budget["host"] for name in ("first", "turns", "pinned"))
    whole = max(first.available_bytes, pinned.available_bytes)
    assert found.models["turns"].takes_turns and not found.models["pinned"].takes_turns
    assert turns.available_bytes == whole - pinned.required_bytes
    assert turns.required_bytes + pinned.required_bytes + turns.reserve_bytes <= whole
    assert found.models["turns"].warnings[0].startswith("fits only while first ")


def test_settings_of_one_model_are_its_own() -> None:
    models = one(set={"n_ctx": 2048}, origin="edgellm.toml: model 1")
    rung = chosen(plan(shapes.cpu_board(), models=models, preset=profile(offload="none")))
    assert why(rung, "n_ctx") == ("2048", "as requested; the model was trained for 40960", "edgellm.toml: model 1")


def test_the_gpu_with_most_free_memory_is_taken_when_one_is_wished() -> None:
    board = shapes.gpu_board(24, 24)
    found = plan(board, memory=shapes.memory(board, gpu_gib=(10, 20)), preset=profile(split_mode="none"))
    rung = chosen(found)
    assert set(rung.budget) == {"host", "GPU-1"}
    assert rung.env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert rung.argv[rung.argv.index("--device") + 1] == "CUDA0"  # the only one it sees


def test_several_gpus_split_by_free_memory_in_pci_order() -> None:
    board = shapes.gpu_board(24, 12)
    board = replace(board, gpus=board.gpus[::-1])
    memory = MemorySnapshot(
        {"host": 64 * GIB, "GPU-0": 24 * GIB, "GPU-1": 12 * GIB},
        {"host": 60 * GIB, "GPU-0": 22 * GIB, "GPU-1": 11 * GIB},
    )
    large = one(shapes.model("Large", shapes.meta(layers=64, embd=5120, heads=40, ff=27648)))
    rung = chosen(plan(board, memory=memory, preset=profile(reserve="1GiB"), models=large))
    assert rung.env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert rung.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert sum(rung.settings.tensor_split) == 65
    used = [1 - domain.headroom_bytes / (domain.available_bytes - domain.reserve_bytes) for domain in gpus(rung)]
    assert abs(used[0] - used[1]) < 0.05, "equally full, as far as whole layers allow"
    assert rung.argv[rung.argv.index("--tensor-split") + 1] == ",".join(f"{n:g}" for n in rung.settings.tensor_split)
    assert rung.argv[rung.argv.index("--split-mode") + 1] == "layer"
    assert rung.argv[rung.argv.index("--device") + 1] == "CUDA0,CUDA1"
    assert rung.budget["GPU-0"].weights_bytes > rung.budget["GPU-1"].weights_bytes > 0


def test_a_gpu_whose_memory_is_unknown_gets_no_layers() -> None:
    board = shapes.gpu_board(24, 24)
    memory = MemorySnapshot({"host": 64 * GIB, "GPU-0": 24 * GIB}, {"host": 60 * GIB, "GPU-0": 22 * GIB})
    assert set(chosen(plan(board, memory=memory)).budget) == {"host", "GPU-0"}


def test_a_jetson_whose_gpu_is_refused_serves_from_the_cpu() -> None:
    board = replace(shapes.jetson(4), refused="CUDA 10.2 is too old")
    found = plan(board, engine=shapes.engine(cuda=True), models=one(shapes.model("Tiny", TINY)))
    assert chosen(found).settings.n_gpu_layers == 0
    assert "the CPU serves: CUDA 10.2 is too old" in found.notes


def test_the_nvmap_regression_is_named_before_it_strikes() -> None:
    board = replace(shapes.jetson(61), l4t="36.4.7")
    big = one(shapes.model("Big", shapes.meta()))
    assert any("36.5 or later" in note for note in plan(board, models=big).notes)
    managed = plan(board, models=big, preset=profile(managed_memory=True))
    assert not any("36.5" in note for note in managed.notes)
    assert chosen(managed).env["GGML_CUDA_ENABLE_UNIFIED_MEMORY"] == "1"
    assert not any("36.5" in note for note in plan(replace(board, l4t="36.5.0"), models=big).notes)


def test_what_past_starts_taught_is_applied_and_shown() -> None:
    last = Measured("Small Q5_K_M, 8192 tokens", 1, 2, 3)
    plain = plan(shapes.jetson(16))
    key = calibration_key("llama", chosen(plain).settings)
    taught = plan(shapes.jetson(16), extras=Extras(calibrations={key: Calibration((1.2, 1.5), last=last)}))
    before, after = (chosen(found).budget["unified"].compute_bytes for found in (plain, taught))
    assert after == pytest.approx(1.5 * before, abs=2)
    assert taught.models["chat"].measured == last


def test_a_file_that_pools_its_output_is_served_as_what_it_is() -> None:
    """Without its switch the engine would answer 501; its whole input has to fit one batch."""
    pooled = shapes.meta(layers=4, embd=512, heads=4, ctx=8192, extra={"pooling_type": 1})
    rung = chosen(plan(shapes.cpu_board(), models=one(shapes.model("E", pooled)), preset=profile(offload="none")))
    assert why(rung, "role") == ("embedding", "the file pools its output: it cannot chat", "planner")
    assert rung.settings.n_batch == rung.settings.n_ubatch == 8192
    last = replace(pooled, extra={**pooled.extra, "llama.pooling_type": 3})
    rung = chosen(plan(shapes.cpu_board(), models=one(shapes.model("L", last)), preset=profile(offload="none")))
    assert rung.settings.n_batch == rung.settings.n_ubatch == 512
    ranks = replace(pooled, extra={**pooled.extra, "llama.pooling_type": 4})
    rung = chosen(plan(shapes.cpu_board(), models=one(shapes.model("R", ranks)), preset=profile(offload="none")))
    assert "--reranking" in rung.argv


def test_a_profile_that_wants_a_gpu_never_serves_from_the_cpu_in_silence() -> None:
    """No GPU, one whose memory is unknown, one that is refused: an error unless the profile says cpu."""
    cuda = shapes.engine(cuda=True)
    unknown = shapes.gpu_board(24)
    cases = [
        (shapes.cpu_board(), shapes.memory(shapes.cpu_board()), "there is none"),
        (unknown, MemorySnapshot({"host": 64 * GIB}, {"host": 60 * GIB}), "its free memory is unknown"),
        (replace(shapes.jetson(4), refused="too old"), shapes.memory(shapes.jetson(4)), "too old"),
    ]
    for board, memory, said in cases:
        with pytest.raises(UnavailableError, match=said):
            plan(board, engine=cuda, memory=memory, preset=profile(backend="cuda"))
        allowed = profile(backend="cuda", fallback="cpu")
        found = plan(board, engine=cuda, memory=memory, preset=allowed, models=one(shapes.model("Tiny", TINY)))
        assert chosen(found).settings.n_gpu_layers == 0
        assert any("no GPU can be used, so the CPU serves" in note for note in found.notes)


def test_a_profile_that_wants_the_cpu_leaves_the_gpu_alone() -> None:
    rung = chosen(plan(shapes.gpu_board(24), preset=profile(backend="cpu")))
    assert rung.settings.n_gpu_layers == 0
    assert rung.env["CUDA_VISIBLE_DEVICES"] == ""


def test_an_embedding_model_gets_no_prompt_cache_and_its_switch() -> None:
    rung = chosen(plan(shapes.cpu_board(), models=one(role="embedding"), preset=profile(offload="none")))
    assert rung.settings.cache_ram_bytes == 0
    assert "--embedding" in rung.argv
    assert "--jinja" not in rung.argv
