"""The assessment by domain: what goes to the GPU, what stays on the host, what a mode of loading costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.models.header import read_header
from edge.models.meta import ModelMeta, Tensor
from edge.models.projector import Projector
from edge.plan.calibration import Calibration, calibration_key
from edge.plan.inputs import Candidate, PlanInputs, candidate_of, situation, weights
from edge.plan.memory import budget, shares
from edge.plan.plan import DomainBudget, Settings
from edge.units import MIB
from tests.fakes.gguf_writer import Gguf
from tests.plan import shapes


def settings(layers: int, n_ctx: int = 4096, mode: str = "none", **more: object) -> Settings:
    base = Settings(n_ctx, 1, layers, "f16", "f16", "auto", mode, 8, 0, devices=("CUDA0",) if layers else ())
    return replace(base, **more)  # type: ignore[arg-type]


def inputs(*vram_gib: float, unified: bool = False, era: str = "load-mode") -> PlanInputs:
    board = shapes.jetson(61.3) if unified else shapes.gpu_board(*vram_gib) if vram_gib else shapes.cpu_board()
    cuda = unified or bool(vram_gib)
    return situation(board, shapes.memory(board), shapes.engine(cuda=cuda, era=era), "1GiB", {})


def thirteen_billion() -> ModelMeta:
    """The model of the recorded start on an H200: 40 layers, Q5_K throughout, no grouped heads."""
    header = shapes.meta(layers=40, embd=5120, heads=40, kv_heads=40, ff=13824, vocab=32000, ctx=4096)
    q5_k = 5.5 / 8
    table = int(5120 * 32000 * q5_k)
    layer = int((4 * 5120 * 5120 + 3 * 5120 * 13824) * q5_k) + 2 * 5120 * 4
    tensors = (
        Tensor("token_embd.weight", "Q5_K", (5120, 32000), 0, table),
        *(Tensor(f"blk.{i}.all.weight", "Q5_K", (1,), 0, layer) for i in range(40)),
        Tensor("output_norm.weight", "F32", (5120,), 0, 5120 * 4),
        Tensor("output.weight", "Q5_K", (5120, 32000), 0, table),
    )
    return replace(header, tensors=tensors)


def of(header: ModelMeta) -> Candidate:
    return candidate_of(shapes.model(header=header))


def test_buffers_agree_with_a_recorded_start_on_a_real_gpu() -> None:
    """NVIDIA H200, llama.cpp 0c1e57098: CUDA0 8427.75 + 3200 + 115.01 MiB, host 107.42 + 24.01 + 0.12 MiB."""
    found = budget(of(thirteen_billion()), settings(41), inputs(140))
    gpu, host = found["GPU-0"], found["host"]
    assert gpu.weights_bytes / MIB == pytest.approx(8427.75, rel=0.001)
    assert gpu.kv_bytes / MIB == 3200
    assert gpu.compute_bytes / MIB == pytest.approx(115.01, rel=0.15)
    assert host.weights_bytes / MIB == pytest.approx(107.42, rel=0.001)
    assert host.kv_bytes == 0
    assert host.compute_bytes / MIB == pytest.approx(24.01 + 0.12, rel=0.15)


def test_on_unified_memory_everything_is_one_sum() -> None:
    """The input table stays on the host, which is the same memory."""
    it = of(thirteen_billion())
    discrete = budget(it, settings(41), inputs(36))
    unified = budget(it, settings(41), inputs(unified=True))
    assert set(unified) == {"unified"}
    for part in ("weights_bytes", "kv_bytes", "compute_bytes", "context_bytes", "page_cache_bytes"):
        assert getattr(unified["unified"], part) == sum(getattr(domain, part) for domain in discrete.values())


def test_a_tied_table_is_kept_twice_once_the_output_is_offloaded() -> None:
    header = shapes.meta(layers=2, tied=True)
    table = header.tensors[0].bytes
    whole = weights(header)
    assert whole.file_bytes == header.tensor_bytes
    found = budget(of(header), settings(3), inputs(24))
    assert found["host"].weights_bytes == table
    assert found["GPU-0"].weights_bytes == header.tensor_bytes
    assert budget(of(header), settings(0), inputs())["host"].weights_bytes == header.tensor_bytes


def test_an_encoder_has_no_output_table() -> None:
    header = shapes.meta("bert", layers=2, tied=True)
    header = replace(header, tensors=tuple(t for t in header.tensors if t.name != "output_norm.weight"))
    assert weights(header).tied_bytes == 0


def test_fc_19_what_stays_on_the_host_is_counted() -> None:
    """FC-19: 41 of 43 layers offloaded left 2.85 GB of host memory that was not counted."""
    it = of(thirteen_billion())
    full, partial = budget(it, settings(41), inputs(140)), budget(it, settings(31, mode="mmap"), inputs(140))
    layer = it.weights.by_layer[0]
    assert partial["host"].weights_bytes == full["host"].weights_bytes + 10 * layer
    assert partial["host"].kv_bytes == 10 * 80 * MIB
    assert partial["GPU-0"].weights_bytes == full["GPU-0"].weights_bytes - 10 * layer
    per_layer = Tensor("per_layer_token_embd.weight", "Q8_0", (1,), 0, 500 * MIB)
    more = replace(it.file.meta, tensors=(*it.file.meta.tensors, per_layer))
    assert budget(of(more), settings(41), inputs(140))["host"].weights_bytes == full["host"].weights_bytes + 500 * MIB


def test_the_projector_goes_where_the_layers_go() -> None:
    it = of(thirteen_billion())
    seen = replace(it, file=replace(it.file, mmproj="/m/mmproj.gguf", projector=Projector(600 * MIB)))
    assert budget(seen, settings(41), inputs(140))["GPU-0"].weights_bytes == 600 * MIB + (
        budget(it, settings(41), inputs(140))["GPU-0"].weights_bytes
    )
    assert budget(seen, settings(0), inputs())["host"].weights_bytes == it.weights.file_bytes + 600 * MIB


@pytest.mark.parametrize(("mode", "wanted"), [("mmap", 0), ("none", 256 * MIB), ("dio", 256 * MIB)])
def test_a_mode_of_loading_costs_what_it_keeps_beside_the_weights(mode: str, wanted: int) -> None:
    found = budget(of(thirteen_billion()), settings(41, mode=mode), inputs(unified=True))
    assert found["unified"].page_cache_bytes == wanted


def test_engines_before_autumn_2026_reserve_logits_for_a_whole_batch() -> None:
    it = of(shapes.meta(vocab=150_000))
    new, old = (budget(it, settings(0), inputs(era=era))["host"].compute_bytes for era in ("load-mode", "flash-value"))
    assert old - new > 100 * MIB


def test_layers_are_cut_as_llama_cpp_cuts_them() -> None:
    """41 units over 3 : 1 are 31 and 10; the output is the last."""
    chosen = settings(41, devices=("CUDA0", "CUDA1"), split_mode="layer", tensor_split=(3.0, 1.0))
    assert shares(chosen, inputs(24, 24), 40) == [("GPU-0", range(31)), ("GPU-1", range(31, 41))]
    partly = replace(chosen, n_gpu_layers=10, tensor_split=(1.0, 1.0))
    assert shares(partly, inputs(24, 24), 40) == [("GPU-0", range(31, 36)), ("GPU-1", range(36, 41))]


def test_several_gpus_hold_the_whole_model_between_them() -> None:
    it = of(thirteen_billion())
    chosen = settings(41, devices=("CUDA0", "CUDA1"), split_mode="layer", tensor_split=(2.0, 1.0))
    one, two = budget(it, settings(41), inputs(48)), budget(it, chosen, inputs(24, 24))
    for part in ("weights_bytes", "kv_bytes"):
        assert getattr(two["GPU-0"], part) + getattr(two["GPU-1"], part) == getattr(one["GPU-0"], part)
    assert two["GPU-0"].compute_bytes == two["GPU-1"].compute_bytes > 0
    assert two["GPU-1"].context_bytes > 0


def test_each_gpu_pays_a_context_of_its_own_size() -> None:
    chosen = settings(41, devices=("CUDA0", "CUDA1"), split_mode="layer", tensor_split=(2.0, 1.0))
    both = budget(of(thirteen_billion()), chosen, inputs(80, 24))
    large, small = (budget(of(thirteen_billion()), settings(41), inputs(size))["GPU-0"] for size in (80, 24))
    assert both["GPU-0"].context_bytes == large.context_bytes > both["GPU-1"].context_bytes == small.context_bytes


def test_a_correction_scales_compute_and_replaces_the_context() -> None:
    it = of(thirteen_billion())
    key = calibration_key("llama", settings(41))
    where = replace(inputs(140), calibrations={key: Calibration((2.0,), (500 * MIB,) * 3)})
    plain, corrected = (budget(it, settings(41), p)["GPU-0"] for p in (inputs(140), where))
    assert corrected.compute_bytes == pytest.approx(2 * plain.compute_bytes, abs=1)
    assert corrected.context_bytes == 500 * MIB
    assert corrected.weights_bytes == plain.weights_bytes


def test_headroom_is_what_is_left_of_available_beside_the_reserve() -> None:
    domain = DomainBudget(available_bytes=100, reserve_bytes=10, weights_bytes=50, kv_bytes=40)
    assert (domain.required_bytes, domain.headroom_bytes, domain.fits) == (90, 0, True)
    assert not replace(domain, compute_bytes=1).fits


ODD_NAMES = ["blk.x.ffn_up.weight", "blk.-99.ffn_up.weight", "blk..w", "blk.", "blk.99999999.w", "blk.\u0661.w"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_tensors_of_no_block_are_counted_and_stop_nothing(tmp_path: Path, name: str) -> None:
    gguf = Gguf("llama").model()
    gguf.tensor(name, 256, 256, type="Q5_K")
    meta = read_header(gguf.save(tmp_path / "m.gguf"))
    plain = read_header(Gguf("llama").model().save(tmp_path / "p.gguf"))
    assert weights(meta).file_bytes == weights(plain).file_bytes + 256 * 256 // 256 * 176
