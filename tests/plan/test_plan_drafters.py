"""The drafter: on a GPU that has room for it, else on the CPU; counted there, rendered for the engine, explained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.board.board import Board
from edge.config.values import ModelConfig, Preset, Profile
from edge.engine.engine import Engine, Flag
from edge.errors import DoesNotFitError
from edge.plan.argv import EnvFacts
from edge.plan.calibration import measure
from edge.plan.companions import drafter_bytes
from edge.plan.inputs import Candidate, candidate_of
from edge.plan.plan import LaunchPlan
from edge.plan.planner import make_plan
from edge.plan.prepare import assumed_engine
from edge.units import GIB, MIB
from tests.plan import shapes
from tests.plan.test_plan_calibration import LOG
from tests.plan.test_plan_engine_options import EMBEDDED, apply
from tests.plan.test_plan_gpus import quality

MODEL = shapes.meta(layers=40, embd=5120, heads=40, kv_heads=10, ff=13824, vocab=100_000, quant="Q8_0")
SMALL = shapes.meta(layers=16, embd=2048, heads=16, kv_heads=4, ff=5632, vocab=100_000, ctx=4096)
NEW = ("--spec-draft-model", "--spec-draft-device", "--spec-draft-ngl", "--spec-type")


def drafted(model: Candidate | None = None, kind: str = "draft-simple") -> Candidate:
    it = model or candidate_of(shapes.model("Model", MODEL))
    file = replace(it.file, drafter="/m/small.gguf", draft_type=kind)
    return replace(it, file=file, drafter=candidate_of(shapes.model("Small", SMALL)))


def able(engine: Engine, *names: str) -> Engine:
    return replace(engine, flags=engine.flags | {name: Flag(name, 1) for name in names or NEW})


def on(
    board: Board, it: Candidate, engine: Engine | None = None, gpu_gib: tuple[float, ...] = (), **preset: Any
) -> Any:
    asked = Preset(**{"n_ctx": 4096, "reserve": "512MiB", "draft": "/m/small.gguf", "cache_ram": 0, **preset})
    models = {"m": (it, ModelConfig("m", "m"))}
    engine = engine or able(shapes.engine(cuda=True))
    return make_plan(
        board, shapes.memory(board, gpu_gib=gpu_gib), Profile("test", "", asked), engine, models, EnvFacts("/h", "/c")
    )


def chosen(plan: Any) -> LaunchPlan:
    ladder = plan.models["m"].ladder
    found: LaunchPlan = ladder.plans[ladder.chosen]
    return found


def value(rung: LaunchPlan, option: str) -> str | None:
    return rung.argv[rung.argv.index(option) + 1] if option in rung.argv else None


def because(rung: LaunchPlan) -> str:
    (reason,) = (each for each in rung.reasons if each.subject == "draft_device")
    assert reason.value == rung.settings.draft_device
    return reason.because


def plain() -> Candidate:
    return candidate_of(shapes.model("Model", MODEL))


def needed(board: Board, it: Candidate, domain: str = "GPU-0") -> float:
    """GiB that a plan needs there."""
    return chosen(on(board, it)).budget[domain].required_bytes / GIB


BIG = shapes.gpu_board(80)
ALONE = needed(BIG, plain())
DRAFTER = needed(BIG, drafted()) - ALONE


def test_the_drafter_is_beside_the_model_where_it_fits() -> None:
    rung = chosen(on(BIG, drafted()))
    assert value(rung, "--spec-draft-device") == value(rung, "--device") == "CUDA0"
    assert value(rung, "--spec-draft-ngl") == "999", "all layers, as the number that older builds want too"
    assert value(rung, "--spec-draft-model") == "/m/small.gguf"
    assert drafter_bytes(drafted(), rung.settings) < DRAFTER * GIB < 1.5 * drafter_bytes(drafted(), rung.settings)
    assert because(rung) == "GPU 0 has room for the drafter, beside the model"
    assert rung.budget["host"] == chosen(on(BIG, plain())).budget["host"]


def test_a_card_of_its_own_is_better_than_the_cpu() -> None:
    """The first card is full with the model; the second is too small for half of the model, and the drafter fits."""
    board = shapes.gpu_board(80, 80)
    rung = chosen(on(board, drafted(), gpu_gib=(ALONE + 0.6, DRAFTER + 1.2)))
    assert rung.settings.n_gpu_layers == 41 and rung.settings.devices == ("CUDA0",)
    assert (value(rung, "--device"), value(rung, "--spec-draft-device")) == ("CUDA0", "CUDA1")
    assert rung.env["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert rung.budget["GPU-1"].weights_bytes == pytest.approx(DRAFTER * GIB, rel=1e-6)
    assert rung.budget["GPU-1"].context_bytes > 0, "it pays for its own CUDA context"
    assert because(rung) == "GPU 1 has room for the drafter, and the GPUs of the model have none"
    assert not any(reason.subject == "gpus" for reason in rung.reasons), "no GPU is left out"


def test_the_number_of_a_device_is_its_place_among_the_visible_ones() -> None:
    """The model is on the second card, so that it is CUDA0; the drafter is on the first one, which comes last."""
    board = shapes.gpu_board(80, 80)
    rung = chosen(on(board, drafted(), gpu_gib=(DRAFTER + 1.2, ALONE + 0.6)))
    assert rung.env["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
    assert (value(rung, "--device"), value(rung, "--spec-draft-device")) == ("CUDA0", "CUDA1")


def test_where_no_gpu_has_room_the_cpu_drafts_and_the_model_keeps_its_layers() -> None:
    board = shapes.gpu_board(80)
    tight = chosen(on(board, drafted(), gpu_gib=(ALONE + 0.6,)))
    assert tight.settings.n_gpu_layers == 41 and tight.settings.n_ctx == 4096 and tight.settings.kv_type_k == "f16"
    assert value(tight, "--spec-draft-device") == "none" and "--spec-draft-ngl" not in tight.argv
    assert "no GPU has room for the drafter" in because(tight)
    free = chosen(on(board, plain(), gpu_gib=(ALONE + 0.6,)))
    assert tight.budget["GPU-0"] == free.budget["GPU-0"]
    more = tight.budget["host"].required_bytes - free.budget["host"].required_bytes
    assert more == pytest.approx(DRAFTER * GIB, rel=1e-6)


def test_a_drafter_takes_no_layer_off_the_gpu() -> None:
    """Of a model that does not fit whole as many layers are there as without it, and it takes what they leave."""
    size = (ALONE * 0.6,)
    asked: dict[str, Any] = {"partial_offload": True, "n_ctx_min": 4096, "kv_type_min": "f16"}
    without = chosen(on(BIG, plain(), gpu_gib=size, **asked))
    rung = chosen(on(BIG, drafted(), gpu_gib=size, **asked))
    assert 0 < rung.settings.n_gpu_layers == without.settings.n_gpu_layers < 41
    assert rung.settings.draft_device == "none"
    two = shapes.gpu_board(80, 80)
    for sizes in ((*size, 2.5), (2.5, *size)):
        rung = chosen(on(two, drafted(), gpu_gib=sizes, split_mode="none", **asked))
        assert rung.settings.n_gpu_layers == without.settings.n_gpu_layers
        assert rung.settings.draft_device == "CUDA1", "a card beside the one of the model"


def test_a_host_that_is_too_small_for_the_drafter_refuses() -> None:
    board = shapes.gpu_board(80, memory_gib=2)
    assert chosen(on(board, plain(), gpu_gib=(ALONE + 0.6,))).settings.n_gpu_layers == 41
    with pytest.raises(DoesNotFitError):
        on(board, drafted(), gpu_gib=(ALONE + 0.6,), n_ctx_min=4096, kv_type_min="f16")


@pytest.mark.parametrize(
    "preset", [{"gpus": ("0",)}, {"tensor_split": (1.0, 0.0)}, {"gpus": ("GPU 0",), "split_mode": "none"}]
)
def test_a_gpu_that_is_not_to_be_used_holds_no_drafter(preset: dict[str, Any]) -> None:
    rung = chosen(on(shapes.gpu_board(80, 80), drafted(), gpu_gib=(ALONE + 0.6, 40), **preset))
    assert "GPU-1" not in rung.budget and rung.env["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert rung.settings.draft_device == "none"


def test_an_instance_of_mig_is_not_added_for_the_drafter() -> None:
    board = shapes.gpu_board(80, 80)
    board = replace(board, gpus=tuple(replace(gpu, uuid=f"MIG-{i}") for i, gpu in enumerate(board.gpus)))
    rung = chosen(on(board, drafted(), gpu_gib=(ALONE + 0.6, 8)))
    assert rung.env["CUDA_VISIBLE_DEVICES"] == "MIG-0" and rung.settings.draft_device == "none"


def test_a_split_model_leaves_room_for_the_drafter_on_one_of_its_cards() -> None:
    half = ALONE * 0.5 + DRAFTER + 1
    rung = chosen(on(shapes.gpu_board(80, 80), drafted(), gpu_gib=(half, half)))
    assert rung.settings.n_gpu_layers == 41 and rung.settings.devices == ("CUDA0", "CUDA1")
    assert rung.settings.draft_device in ("CUDA0", "CUDA1")
    drafts, other = rung.budget["GPU-0"], rung.budget["GPU-1"]
    if rung.settings.draft_device == "CUDA1":
        drafts, other = other, drafts
    assert abs(drafts.required_bytes - other.required_bytes) < 1.2 * GIB, "the split allows for it"


def test_a_jetson_drafts_on_its_gpu() -> None:
    rung = chosen(on(shapes.jetson(64), drafted()))
    assert (rung.settings.draft_device, value(rung, "--spec-draft-ngl")) == ("CUDA0", "999")
    assert "has room for the drafter" in because(rung)


def test_a_model_on_the_cpu_drafts_there() -> None:
    rung = chosen(on(shapes.cpu_board(64), drafted(), able(shapes.engine()), backend="cpu"))
    assert (value(rung, "--device"), value(rung, "--spec-draft-device")) == ("none", "none")
    assert because(rung) == "the drafter is on the CPU, as the model is"
    embedded = chosen(on(shapes.cpu_board(64), drafted(), EMBEDDED, backend="cpu"))
    params = embedded.argv[embedded.argv.index("--params") + 1]
    assert '"speculative.draft.n_gpu_layers":0' in params
    assert apply({"speculative.draft.n_gpu_layers": 0}).speculative.draft.n_gpu_layers == 0
    assert '"speculative.draft.n_gpu_layers"' not in "".join(chosen(on(shapes.cpu_board(64), plain(), EMBEDDED)).argv)


def test_a_drafter_made_for_the_model_is_where_the_model_is() -> None:
    """It computes with the model's output tensor or cache, which no other device can read (src/models/eagle3.cpp)."""
    engine = able(shapes.engine(cuda=True))
    rung = chosen(on(BIG, drafted(kind="draft-eagle3"), engine, gpu_gib=(ALONE + DRAFTER + 0.7,)))
    assert rung.settings.draft_device is None and "--spec-draft-device" not in rung.argv
    assert rung.budget["GPU-0"].required_bytes == pytest.approx((ALONE + DRAFTER) * GIB, rel=1e-6)
    tight = chosen(on(BIG, drafted(kind="draft-eagle3"), engine, gpu_gib=(ALONE + 0.6,), n_ctx_min=512))
    assert tight.settings.n_ctx < 4096 or tight.settings.kv_type_k != "f16", "it is on no CPU, so the model gives way"


@pytest.mark.parametrize(
    ("names", "here", "cpu"),
    [
        (NEW, ("--spec-draft-device", "CUDA0", "--spec-draft-ngl", "999"), ("--spec-draft-device", "none")),
        (
            ("-devd", "--device-draft", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--model-draft"),
            ("--device-draft", "CUDA0", "--gpu-layers-draft", "999"),
            ("--device-draft", "none"),
        ),
        (("-ngld", "--gpu-layers-draft", "-md"), ("--gpu-layers-draft", "999"), ("--gpu-layers-draft", "0")),
    ],
    ids=["2026", "2025", "2024"],
)
def test_fc_28_the_device_in_the_words_of_the_era(
    names: tuple[str, ...], here: tuple[str, ...], cpu: tuple[str, ...]
) -> None:
    engine = able(shapes.engine(cuda=True), *names)
    for room, words in ((DRAFTER + 1, here), (0.6, cpu)):
        argv = chosen(on(BIG, drafted(), engine, gpu_gib=(ALONE + room,))).argv
        start = argv.index(words[0])
        assert argv[start : start + len(words)] == words
        assert not {*here, *cpu} - {*words} & {*argv}.difference(("none", "CUDA0", "0")), argv
    two = chosen(on(shapes.gpu_board(80, 80), drafted(), engine, gpu_gib=(ALONE * 0.7, ALONE * 0.7)))
    assert two.settings.draft_device == ("none" if len(names) == 3 else "CUDA0"), "it cannot name one of two devices"


def test_an_engine_that_is_not_built_yet_takes_them() -> None:
    engine = assumed_engine(BIG, "cuda", "/e/llama-server")
    rung = chosen(on(BIG, drafted(), engine))
    assert value(rung, "--spec-draft-device") == "CUDA0" and rung.warnings == ()


def test_the_cache_of_the_drafter_is_as_long_as_the_models() -> None:
    """Not as the drafter was trained for: 4096 tokens. llama.cpp gives it the model's context."""
    long, short = (chosen(on(BIG, drafted(), n_ctx=size, n_parallel=2)) for size in (32768, 8192))
    one, other = (drafter_bytes(drafted(), rung.settings) for rung in (long, short))
    token = SMALL.n_layer * 4 * (SMALL.key_length + SMALL.value_length) * 2
    assert one - other == 2 * (32768 - 8192) * token
    q8 = chosen(on(BIG, drafted(), n_ctx=8192, n_parallel=2, kv_type_k="q8_0", kv_type_v="q8_0"))
    assert drafter_bytes(drafted(), q8.settings) == other, "its cache is f16 whatever the model's"


def test_mtp_layers_are_counted_on_the_last_gpu() -> None:
    """They are the last layers of the file, which llama.cpp puts on the last device of the split."""
    meta = replace(MODEL, extra=MODEL.extra | {"llama.nextn_predict_layers": 1})
    it = candidate_of(shapes.model("Model", meta))
    board, engine = shapes.gpu_board(80, 80), able(shapes.engine(cuda=True))
    size = (ALONE * 0.7, ALONE * 0.7)
    one, other = (
        chosen(on(board, it, engine, gpu_gib=size, draft="", speculation=way, tensor_split=(1.0, 1.0))).budget
        for way in ("mtp", "off")
    )
    assert one["GPU-0"].weights_bytes == other["GPU-0"].weights_bytes
    layer = next(tensor.bytes for tensor in meta.tensors if tensor.name.startswith("blk.39."))
    assert one["GPU-1"].weights_bytes - other["GPU-1"].weights_bytes > layer


CARDS = st.lists(st.floats(1.5, 40), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(CARDS, st.floats(8, 64), st.sampled_from([4096, 32768]), st.booleans())
def test_more_gpus_never_make_a_drafted_plan_worse(
    sizes: list[float], host_gib: float, n_ctx: int, partial: bool
) -> None:
    """For each subset without one card; and no layer is lost to the drafter, wherever it is."""
    preset = {"n_ctx": n_ctx, "partial_offload": partial, "fallback": "refuse"}

    def of(cards: tuple[float, ...], it: Candidate) -> tuple[float, ...] | None:
        try:
            plan = on(shapes.gpu_board(*cards, memory_gib=host_gib), it, **preset)
        except DoesNotFitError:
            return None
        rung = chosen(plan)
        assert rung.fits and rung.settings.draft_device in (None, "none", "CUDA0", "CUDA1", "CUDA2", "CUDA3")
        visible = rung.env["CUDA_VISIBLE_DEVICES"].split(",")
        assert {name for name in rung.budget if name != "host"} == set(visible)
        if (rung.settings.draft_device or "none") != "none":
            assert int(str(rung.settings.draft_device)[4:]) < len(visible)
        return quality(plan)

    whole = of(tuple(sizes), drafted())
    for index in range(len(sizes)):
        part = of(tuple(sizes[:index] + sizes[index + 1 :]), drafted())
        assert part is None or (whole is not None and whole >= part), (index, whole, part)
    if whole is not None:
        without = of(tuple(sizes), plain())
        assert without is not None and without[:2] == whole[:2]


# --- what a start teaches ---------------------------------------------------------------------------------------------

CONTEXT = "0.06.885.000 I llama_context: constructing llama_context"
OF_DRAFTER = [
    "0.07.000.000 I load_tensors: loading model tensors, this can take a while... (load_mode = none)",
    "0.07.100.000 I load_tensors:        CUDA1 model buffer size =   700.00 MiB",
    CONTEXT,
    "0.07.200.000 I llama_kv_cache:      CUDA1 KV buffer size =    80.00 MiB",
    "0.07.300.000 I sched_reserve:      CUDA1 compute buffer size =    60.00 MiB",
]


def test_what_drafts_teaches_nothing_about_the_model() -> None:
    """The drafter's load is the last of the log: its cache was taken for the model's, and learnt."""
    at = next(i for i, line in enumerate(LOG) if "output buffer" in line)
    log = [*LOG[:at], CONTEXT, *LOG[at:]]
    alone = measure("M", log, gpu_bytes=6)
    found = measure("M", [*log, *OF_DRAFTER], gpu_bytes=6, drafts=True)
    assert (found.weights_bytes, found.kv_bytes, found.compute_bytes) == (
        alone.weights_bytes,
        alone.kv_bytes,
        alone.compute_bytes,
    )
    assert found.gpu_buffers_bytes == alone.gpu_buffers_bytes + 840 * MIB, "it is no CUDA context"
    mtp = measure("M", [*log, *OF_DRAFTER[2:]], gpu_bytes=6, drafts=True)
    assert mtp.kv_bytes == alone.kv_bytes
