"""The selector: golden answers by board, quantization order, and what is here before what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from msgspec.structs import replace

from edge.config import Config, load, resolve_profile
from edge.config.values import Preset
from edge.errors import DoesNotFitError, ModelMissingError
from edge.models.catalogue import CatalogueRow
from edge.models.catalogue import load as load_catalogue
from edge.models.quant import QuantPreference, order
from edge.models.store import Store
from edge.paths import folders
from edge.plan.candidates import DownloadCandidate, ranking
from edge.plan.choose import Chooser, Chosen
from edge.plan.inputs import candidate_of, situation
from edge.plan.planner import plan_inputs
from edge.plan.prepare import assumed_engine
from edge.plan.select import select, tokens_s
from tests.plan import shapes
from tests.plan.golden import machine
from tests.plan.random_gguf import Shape, write


@pytest.fixture(scope="module")
def rows() -> tuple[CatalogueRow, ...]:
    return load_catalogue()


def choose(
    name: str, rows: tuple[CatalogueRow, ...], tmp_path: Path, *settings: str, model: str | None = None
) -> tuple[Chosen, Config]:
    places = folders({}, tmp_path)
    config = load(places, {"set": list(settings), "model": [model] if model else []}, {})
    board, memory = machine(name)
    profile = resolve_profile(config, board, places)
    engine = assumed_engine(board, profile.preset.recipe, "/e/llama-server")
    preset, where = plan_inputs(board, memory, profile, engine, {})
    return Chooser(Store(places.models), where, rows).choose(config, preset), config


GOLDEN = {
    # 8 GB of unified memory: headless the wanted quantization, with a desktop a smaller one of the same model.
    "orin-nano-8": "Qwen3.5-4B:Q5_K_M",
    "orin-nano-8-desktop": "Qwen3.5-4B:Q4_K_M",
    "orin-nx-16": "Qwen3.5-9B:Q5_K_M",
    # A mixture of experts: a dense model of this size would be slow on this memory.
    "agx-orin-32": "Qwen3.6-35B-A3B:UD-Q4_K_M",
    "agx-orin-64": "Qwen3.6-35B-A3B:UD-Q5_K_M",
    "thor": "gpt-oss-120b:MXFP4",
    # A discrete GPU has the bandwidth for a dense one.
    "rtx-4090": "Qwen3.8-27B:UD-Q4_K_XL",
    "cpu-16": "Qwen3.5-4B:Q5_K_M",
    "nano": "Qwen3.5-2B:Q5_K_M",
}


@pytest.mark.parametrize(("name", "wanted"), GOLDEN.items())
def test_golden_answers(name: str, wanted: str, rows: tuple[CatalogueRow, ...], tmp_path: Path) -> None:
    chosen, _config = choose(name, rows, tmp_path)
    (offer,) = chosen.absent.values()
    assert offer.id == wanted


def test_quality_takes_what_there_is_room_for(rows: tuple[CatalogueRow, ...], tmp_path: Path) -> None:
    chosen, _config = choose("agx-orin-64", rows, tmp_path, "prefer=quality")
    assert [offer.id for offer in chosen.absent.values()] == ["Qwen3.6-35B-A3B:Q8_0"]
    faster, _config = choose("agx-orin-64", rows, tmp_path, "prefer=speed")
    assert [offer.id for offer in faster.absent.values()] == ["Qwen3.6-35B-A3B:UD-Q4_K_M"]


@pytest.mark.parametrize(
    ("isa", "cores", "wanted"),
    [
        (("avx2", "avx512f"), 2, "Qwen3.5-2B:Q5_K_M"),  # memory alone would allow 6 tokens/s of a model of 16 GiB
        (("avx2",), 2, "LFM2.5-1.2B-Instruct:Q5_K_M"),
        (("avx2",), 8, "gemma-4-26B-A4B-it:UD-Q4_K_M"),
        (("avx2",), 1, "Qwen3-0.6B:Q5_K_M"),
        ((), 2, "gemma-4-26B-A4B-it:UD-Q4_K_M"),  # cores of unknown speed are not judged
    ],
)
def test_a_few_cores_read_prompts_slowly_whatever_their_memory(
    isa: tuple[str, ...], cores: int, wanted: str, rows: tuple[CatalogueRow, ...], tmp_path: Path
) -> None:
    places = folders({}, tmp_path)
    board, memory = machine("x86-vm")
    board = replace(board, cpu=replace(board.cpu, isa=isa, physical_cores=cores, usable_cores=None))
    config = load(places, {}, {})
    profile = resolve_profile(config, board, places)
    preset, where = plan_inputs(board, memory, profile, assumed_engine(board, "cpu", "/e/llama-server"), {})
    chosen = Chooser(Store(places.models), where, rows).choose(config, preset)
    assert [offer.id for offer in chosen.absent.values()] == [wanted]
    assert ("of a prompt" in " ".join(chosen.notes)) == bool(isa)


def test_the_choice_says_why(rows: tuple[CatalogueRow, ...], tmp_path: Path) -> None:
    notes = " ".join(choose("orin-nano-8-desktop", rows, tmp_path)[0].notes)
    assert "Qwen3.5-4B:Q4_K_M is the best of the catalogue that fits" in notes
    assert "Q4_K_M, because Q5_K_M does not fit" in notes
    assert "memory bandwidth allows about 20 tokens/s" in notes


def offer(quant: str, size: int, path: str | None = "/m") -> DownloadCandidate:
    return DownloadCandidate("M", quant, size, path)


def test_order_of_quantizations() -> None:
    group = [offer(q, s) for q, s in (("Q8_0", 80), ("Q5_K_M", 50), ("Q4_K_M", 40), ("Q6_K", 60), ("Q2_K", 20))]
    found = {p: [o.quant for o in order(group, QuantPreference(prefer=p))] for p in ("balanced", "quality", "speed")}
    assert found["balanced"] == ["Q5_K_M", "Q4_K_M", "Q6_K", "Q8_0", "Q2_K"]
    assert found["quality"] == ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q2_K"]
    assert found["speed"] == ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q2_K"]


# llama.cpp, generation: memory bandwidth in GB/s, weights in GB, part that a token reads, tokens/s. Sources:
# jetson-ai-lab benchmarks.json (Nemotron), smolhub.com (LFM2.5, SmolLM2), zoe-ai-assistant (Llama 3.2).
PUBLISHED = {
    "Orin Nano Super, Nemotron-3-Nano-4B Q4_K_M": (102, 2.79, 1.0, 18),
    "Orin NX 16, Nemotron-3-Nano-4B Q4_K_M": (102.4, 2.79, 1.0, 22),
    "AGX Orin 64, Nemotron-3-Nano-4B Q4_K_M": (204.8, 2.79, 1.0, 43),
    "Thor, Nemotron-3-Nano-4B Q4_K_M": (273, 2.79, 1.0, 56),
    "AGX Orin 64, Nemotron-3-Nano-30B Q4_K_M": (204.8, 24.5, 0.11, 39.1),
    "Thor, Nemotron-3-Nano-30B Q4_K_M": (273, 24.5, 0.11, 61.7),
    "Orin Nano Super, LFM2.5-1.2B Q4_K_M": (102, 0.73, 1.0, 54.1),
    "Orin Nano Super, SmolLM2-135M Q4_1": (102, 0.1, 1.0, 165.2),
    "Orin NX 16, Llama-3.2-3B Q4_K_M": (102.4, 2.02, 1.0, 27.2),
}


@pytest.mark.parametrize(("bandwidth", "size", "active", "measured"), PUBLISHED.values(), ids=PUBLISHED)
def test_speeds_are_those_that_were_published(bandwidth: float, size: float, active: float, measured: float) -> None:
    board = replace(shapes.jetson(61), bandwidth_bytes_s=bandwidth * 1e9)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    found = tokens_s(DownloadCandidate("M", "Q4_K_M", int(size * 1e9), active=active), Preset(), where)
    assert found == pytest.approx(measured, rel=0.25)


def test_speed_is_unknown_without_the_bandwidth() -> None:
    board = replace(shapes.jetson(61), bandwidth_bytes_s=None)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    assert tokens_s(DownloadCandidate("D", "Q5_K_M", 20 * 10**9), Preset(), where) is None


def test_what_is_here_is_preferred_and_a_better_one_is_named(tmp_path: Path) -> None:
    board = shapes.jetson(15.3)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    small = candidate_of(shapes.model("Small", shapes.meta(layers=8)))
    large = candidate_of(shapes.model("Large", shapes.meta()))
    here = DownloadCandidate("Small", "Q5_K_M", small.file.bytes, "/m/small.gguf", rank=5)
    there = DownloadCandidate("Large", "Q5_K_M", large.file.bytes, None, "hf://x/y", rank=1)
    found = select([here, there], Preset(), where, lambda o: small if o.name == "Small" else large)
    assert (found.offer, found.better) == (here, there)
    assert "the best in the store that fits" in found.because


def test_a_slow_or_tight_model_that_is_here_is_still_served() -> None:
    board = replace(shapes.jetson(15.3), bandwidth_bytes_s=10e9)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    it = candidate_of(shapes.model())
    only = DownloadCandidate("Slow", "Q5_K_M", it.file.bytes, "/m/slow.gguf")
    assert select([only], Preset(), where, lambda _: it).offer is only


def test_a_model_that_cannot_chat_is_not_chosen() -> None:
    """FC-88: nor is one without a chat template while there is another."""
    board = shapes.jetson(15.3)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    files = {
        "Embedder": shapes.meta(extra={"pooling_type": 3}),
        "Base": replace(shapes.meta(layers=24), chat_template=False),
        "Chat": shapes.meta(layers=8),
    }
    loaded = {name: candidate_of(shapes.model(name, header)) for name, header in files.items()}
    here = [DownloadCandidate(name, "Q5_K_M", it.file.bytes, f"/m/{name}.gguf") for name, it in loaded.items()]
    assert select(here, Preset(), where, lambda offer: loaded[offer.name]).offer.name == "Chat"
    assert select(here[:2], Preset(), where, lambda offer: loaded[offer.name]).offer.name == "Base"


def test_nothing_small_enough_is_said() -> None:
    board = shapes.jetson(3)
    where = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    huge = DownloadCandidate("Huge", "Q5_K_M", 50 * 10**9, "/m/huge.gguf")
    with pytest.raises(DoesNotFitError, match="no model is small enough for this machine"):
        select([huge], Preset(), where, lambda _: None)


def test_where_it_is_tight_the_next_model_stands_behind() -> None:
    """Its header is not read otherwise: that would delay each start."""
    files = {
        name: candidate_of(shapes.model(name, shapes.meta(layers=layers)))
        for name, layers in (("Large", 32), ("Small", 8))
    }
    here = [DownloadCandidate(name, "Q5_K_M", it.file.bytes, f"/m/{name}.gguf") for name, it in files.items()]
    board = shapes.jetson(15.3)
    for available, wanted in ((13.0, []), (7.6, ["Small"])):
        memory = shapes.memory(board, available)
        where = situation(board, memory, shapes.engine(cuda=True), "1GiB", {})
        found = select(here, Preset(n_ctx=16384), where, lambda offer: files[offer.name])
        assert found.offer.name == "Large"
        assert [it.file.name for it in found.smaller] == wanted


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A state folder with real files: two quantizations of one model, another model, a broken one."""
    path = tmp_path_factory.mktemp("store")
    models = folders({}, path).models
    models.mkdir(parents=True)
    shape = Shape(layers=2, embd=256, ff=512)
    write(models / "Rnd-F16.gguf", shape, smollm2)
    write(models / "Rnd-Q8_0.gguf", replace(shape, type=Type.Q8_0), smollm2)
    write(models / "Other-Q8_0.gguf", replace(shape, layers=1, type=Type.Q8_0), smollm2)
    (models / "Broken-Q4_K_M.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    return path


def test_a_name_takes_the_best_file_that_is_here(state: Path, rows: tuple[CatalogueRow, ...]) -> None:
    chosen, _config = choose("cpu-16", rows, state, model="chat=rnd")
    found, config = chosen.models["chat"]
    assert (found.file.quant, config.id, chosen.absent) == ("Q8_0", "chat", {})
    larger, _config = choose("cpu-16", rows, state, model="chat=Rnd:F16")
    assert larger.models["chat"][0].file.quant == "F16"
    assert [each.file.quant for each in larger.smaller["chat"]] == ["Q8_0"]
    by_path, _config = choose("cpu-16", rows, state, model=f"chat={folders({}, state).models / 'Rnd-F16.gguf'}")
    assert by_path.models["chat"][0].file.quant == "F16"


def test_nothing_named_takes_the_largest_that_is_here(state: Path, rows: tuple[CatalogueRow, ...]) -> None:
    chosen, _config = choose("cpu-16", rows, state)
    assert {model_id: found.file.quant for model_id, (found, _model) in chosen.models.items()} == {"Rnd": "Q8_0"}
    assert any("would fit and is better: edgellm model pull Qwen3.5-4B:Q5_K_M" in note for note in chosen.notes)


def test_a_name_of_the_catalogue_is_planned_before_it_is_here(rows: tuple[CatalogueRow, ...], tmp_path: Path) -> None:
    chosen, _config = choose("orin-nano-8", rows, tmp_path, model="qwen3.5-9b:q4_k_m")
    assert str(chosen.absent["qwen3.5-9b"].source).startswith("hf://unsloth/Qwen3.5-9B-GGUF")
    with pytest.raises(ModelMissingError, match=r"there is no Q2_K of Qwen3\.5-9B"):
        choose("orin-nano-8", rows, tmp_path, model="Qwen3.5-9B:Q2_K")
    with pytest.raises(ModelMissingError):
        choose("orin-nano-8", rows, tmp_path, model="No-Such-Model")


def test_the_ranking_names_every_chat_model_of_the_catalogue(rows: tuple[CatalogueRow, ...]) -> None:
    """A typing error in profiles/ranking.toml would take a model out of the choice without a word.

    So would a row that is not ranked.
    """
    assert set(ranking()) == {row.name.lower() for row in rows if row.role == "chat"}
