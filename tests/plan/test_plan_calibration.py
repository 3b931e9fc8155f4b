"""What a start measured corrects the next plan of the same engine and architecture, and survives damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.daemon.planning import freed_bytes
from edge.models.meta import ModelMeta
from edge.plan.calibration import Calibration, calibrate, calibration_key, measure
from edge.plan.calibration_file import load, record
from edge.plan.inputs import candidate_of, situation
from edge.plan.memory import budget
from edge.plan.plan import LaunchPlan, Measured, Settings
from edge.units import MIB
from tests.plan import shapes

# As an H200 said it: a dry run of --fit first, then the load.
LOG = """
0.00.449.628 I load_tensors: loading model tensors, this can take a while... (load_mode = none)
0.00.508.759 I load_tensors:        CUDA0 model buffer size =  8427.75 MiB
0.00.508.760 I load_tensors:    CUDA_Host model buffer size =   107.42 MiB
0.06.885.631 I llama_context:  CUDA_Host  output buffer size =     0.12 MiB
0.06.886.191 I llama_kv_cache:      CUDA0 KV buffer size =  3200.00 MiB
0.06.913.688 I sched_reserve:      CUDA0 compute buffer size =   115.01 MiB
0.06.913.697 I sched_reserve:  CUDA_Host compute buffer size =    24.01 MiB
""".strip().splitlines()

GPU = Settings(4096, 1, 33, "f16", "f16", "on", "none", 8, 0, devices=("CUDA0",))


KEY = calibration_key("llama", GPU)


def plan(calibration: Calibration | None = None) -> LaunchPlan:
    board = shapes.gpu_board(24)
    inputs = situation(board, shapes.memory(board), shapes.engine(cuda=True), "1GiB", {})
    if calibration:
        inputs = replace(inputs, calibrations={KEY: calibration})
    return LaunchPlan(0, GPU, budget(candidate_of(shapes.model()), GPU, inputs), (), {})


def compute(found: LaunchPlan) -> int:
    return sum(domain.compute_bytes for domain in found.budget.values())


def test_weights_that_were_copied_to_a_gpu_are_freed_with_their_engine() -> None:
    """Mapped weights are page cache, which counts as available on the host; on a GPU they are not."""
    made = plan()
    mapped = replace(made, settings=replace(made.settings, load_mode="mmap"))
    (gpu,) = [domain for domain in made.budget if domain != "host"]
    assert freed_bytes(mapped, gpu) == freed_bytes(made, gpu) >= made.budget[gpu].weights_bytes > 0
    assert freed_bytes(mapped, "host") < freed_bytes(made, "host")


def test_buffers_are_read_from_the_log() -> None:
    found = measure("M", LOG, rss_bytes=5, gpu_bytes=6)
    assert found.weights_bytes / MIB == pytest.approx(8427.75 + 107.42)
    assert found.kv_bytes == 3200 * MIB
    assert found.compute_bytes / MIB == pytest.approx(115.01 + 24.01 + 0.12, abs=0.01)
    assert (found.what, found.rss_bytes, found.gpu_bytes) == ("M", 5, 6)
    assert found.gpu_buffers_bytes / MIB == pytest.approx(8427.75 + 3200 + 115.01), "CUDA_Host is on the host"
    assert measure("M", [*LOG, *LOG]) == measure("M", LOG)  # a dry run before the load counts once
    assert measure("M", ["nothing"]).weights_bytes == 0


def starts(*ratios: float) -> Calibration:
    """The calibration after starts that took these parts of the estimate."""
    found = Calibration()
    for ratio in ratios:
        made = plan(found)
        found = calibrate(found, made, Measured(compute_bytes=int(ratio * compute(made) / found.compute)))
    return found


def test_a_larger_need_counts_at_once() -> None:
    assert starts(2).compute == pytest.approx(2, rel=1e-3)
    assert starts(1, 0.9, 1.4).compute == pytest.approx(1.4, rel=1e-3)


def test_a_single_sample_never_lowers_the_estimate() -> None:
    """A load that was cut short, or a log that lost a line, looks like a small need."""
    assert starts(0.6).compute == starts(0.6, 0.6).compute == 1
    assert starts(0.6, 0.7, 0.65).compute == pytest.approx(0.7, rel=1e-3), "three starts agree"
    assert starts(1.3, 1.3, 1.3, 0.6).compute == pytest.approx(1.3, rel=1e-3)


def test_two_models_by_turns_settle_on_one_figure() -> None:
    """With a mean of the last two the plan would change at every start."""
    figures = {round(starts(*([1.2, 0.9] * turns)).compute, 3) for turns in range(1, 5)}
    assert figures == {1.2}


def test_it_is_kept_by_what_it_depends_on() -> None:
    changes: list[dict[str, Any]] = [
        {"n_ubatch": 256},
        {"n_ctx": 8192},
        {"flash_attention": "off"},
        {"n_ctx": 8192, "n_parallel": 2},
    ]
    keys = {calibration_key("llama", replace(GPU, **change)) for change in changes}
    assert len(keys | {calibration_key("llama", GPU), calibration_key("qwen3", GPU)}) == 6
    assert calibration_key("llama", replace(GPU, n_ctx=3072)) == calibration_key("llama", GPU), "one class of contexts"


def test_the_context_is_what_the_gpu_held_beside_the_buffers() -> None:
    measured = Measured("M", 100 * MIB, 50 * MIB, 30 * MIB, None, 560 * MIB, gpu_buffers_bytes=160 * MIB)
    found = calibrate(Calibration(), plan(), measured)
    assert found.context_bytes == (400 * MIB,)
    assert plan(found).budget["GPU-0"].context_bytes == 400 * MIB
    assert calibrate(Calibration(), plan(), replace(measured, gpu_bytes=None)).context_bytes == ()
    small = calibrate(Calibration(), plan(), replace(measured, gpu_bytes=300 * MIB))
    assert plan(small).budget["GPU-0"].context_bytes > 140 * MIB, "one small sample is not believed"


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 5))
def test_no_log_makes_a_plan_absurd(compute_bytes: int, gpu_bytes: int, samples: int) -> None:
    old = Calibration((1.0,) * samples)
    new = calibrate(old, plan(), Measured("M", 1, 1, compute_bytes, None, gpu_bytes, gpu_buffers_bytes=1 << 30))
    assert 0.5 <= new.compute <= 4
    assert all(size >= 0 for size in new.context_bytes)


def test_it_is_kept_by_engine_and_applied(tmp_path: Path) -> None:
    path = tmp_path / "data" / "calibration.json"
    assert load(path, "e1") == {}
    estimate = compute(plan())
    record(path, "e1", "llama", plan(), Measured("M", compute_bytes=int(1.3 * estimate)))
    record(path, "e1", "qwen3", plan(), Measured("Q", compute_bytes=estimate))
    record(path, "e2", "llama", plan(), Measured("M", compute_bytes=estimate))
    found = load(path, "e1")
    assert set(found) == {KEY, calibration_key("qwen3", GPU)}
    assert found[KEY].compute == pytest.approx(1.3, rel=1e-3)
    assert found[KEY].last == Measured("M", compute_bytes=int(1.3 * estimate))
    assert compute(plan(found[KEY])) == pytest.approx(1.3 * estimate, rel=1e-3)
    assert load(path, "e3") == {}
    assert json.loads(path.read_text())["schema"] == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": 9, "engines": {"e": {"llama": {"compute": 3}}}}',
        '{"schema": 1, "engines": {"e": {"llama": {"compute": 3}}}}',
        '{"schema": 2, "engines": []}',
        '{"schema": 2, "engines": {"e": []}}',
    ],
)
def test_a_damaged_or_newer_file_teaches_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    assert load(path, "e") == {}
    record(path, "e", "llama", plan(), Measured("M", compute_bytes=1))
    assert len(load(path, "e")[KEY].compute_factors) == 1


@pytest.mark.parametrize(
    "row",
    [
        3,
        "\ud800",
        {"compute_factors": "x"},
        {"context_bytes": [-1.5]},
        {"last": {"rss_bytes": "y"}},
        {"last": "\udfff"},
    ],
)
def test_a_damaged_row_teaches_nothing(tmp_path: Path, row: object) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"schema": 2, "engines": {"e": {KEY: row}}}))
    assert load(path, "e")[KEY] == Calibration()


def test_absurd_factors_are_bounded() -> None:
    assert (Calibration((1e9,)).compute, Calibration((1e-9,) * 3).compute) == (4.0, 0.5)


def kv(found: LaunchPlan) -> int:
    return sum(domain.kv_bytes for domain in found.budget.values())


def caches(*ratios: float, meta: ModelMeta | None = None) -> Calibration:
    """The calibration after starts whose cache took these parts of the computed one."""
    found, true = Calibration(), kv(plan())
    for ratio in ratios:
        found = calibrate(found, plan(found), Measured(kv_bytes=int(ratio * true)), meta or shapes.model().meta)
    return found


def test_a_smaller_cache_with_everything_as_requested_is_learnt() -> None:
    """A window that the planner does not know: the engine is right, and the third start's plan uses its figure."""
    true = kv(plan())
    assert kv(plan(caches(0.2, 0.2))) == true, "two starts may be two truncated logs"
    assert kv(plan(caches(0.2, 0.2, 0.2))) == pytest.approx(0.2 * true, rel=1e-3)
    assert kv(plan(caches(*[0.2] * 9))) == pytest.approx(0.2 * true, rel=1e-3), "its own figure is no new discount"
    assert kv(plan(caches(1.3))) == pytest.approx(1.3 * true, rel=1e-3), "a larger one counts at once"


def test_a_cache_that_the_engine_chose_is_not_learnt() -> None:
    found = Calibration()
    for _ in range(4):
        found = calibrate(found, plan(found), Measured(kv_bytes=kv(plan()) // 4))
    assert kv(plan(found)) == kv(plan())


def test_another_model_of_the_same_architecture_is_not_made_smaller() -> None:
    wider = replace(shapes.model().meta, n_layer=shapes.model().meta.n_layer + 1)
    assert kv(plan(caches(0.2, 0.2, 0.2, meta=wider))) == kv(plan())


def test_learnt_caches_survive_the_file_and_are_bounded(tmp_path: Path) -> None:
    path, meta = tmp_path / "calibration.json", shapes.model().meta
    for number in range(40):
        one = replace(meta, key_length=64 + number)
        record(path, "e", "llama", plan(), Measured("M", kv_bytes=kv(plan())), one)
    (found,) = load(path, "e").values()
    assert len(found.kv_factors) == 16 and found.kv(meta) == 1.0
    assert set(found.kv_factors.values()) == {(1.0,)}
