"""What a CPU engine keeps of the weights: figures of real starts, with and without a mapping of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.board.board import Board
from edge.models.open import open_model
from edge.plan.inputs import Candidate, candidate_of, situation
from edge.plan.memory import host_weights_bytes, repacked_types
from edge.plan.plan import Settings
from edge.units import MIB
from tests.bench.memory_models import MODELS, WIDE, dense, write_model
from tests.plan import shapes

SETTINGS = Settings(4096, 1, 0, "f16", "f16", "on", "none", 8, 0)
EPYC = ("avx", "avx2", "avx512f", "fma", "f16c")
# KiB of all model buffers of llama.cpp 0c1e57098 on a Xeon with AMX, --load-mode none.
AMX_KIB = {
    "llama": 64000,
    "llama-wide": 463186,
    "llama-tied": 64000,
    "llama-q6_k": 662866,
    "llama-f16": 111135,
    "qwen2-wide": 564265,
    "gemma3-wide": 1617623,
    "qwen3moe-wide": 563548,
    "gpt-oss": 253102,
    "mamba2-wide": 783227,
    "gemma4-wide": 1840118,
}


def cpu(*isa: str) -> Board:
    board = shapes.cpu_board(64)
    return replace(board, cpu=replace(board.cpu, isa=isa))


def planned(it: Candidate, board: Board, mode: str) -> int:
    inputs = situation(board, shapes.memory(board), shapes.engine(), "1GiB", {})
    return host_weights_bytes(it.weights, replace(SETTINGS, load_mode=mode), inputs)


@pytest.mark.parametrize(
    ("kind", "mode", "mib"),
    [("Q4_0", "mmap", 585.7), ("Q4_0", "none", 443.9), ("Q8_0", "mmap", 572.3), ("Q8_0", "none", 572.3)],
)
def test_a_table_that_is_the_output_too_is_there_twice_once_it_is_repacked(
    kind: str, mode: str, mib: float, tmp_path: Path
) -> None:
    """Real starts on an EPYC, the embedded engine and the pinned llama-server: the same figures."""
    path = tmp_path / "tied.gguf"
    dense("llama", kind, **WIDE, tied=1).file.save_sparse(path)
    assert planned(candidate_of(open_model(path)), cpu(*EPYC), mode) / MIB == pytest.approx(mib, abs=0.1)


@pytest.mark.parametrize("model", AMX_KIB)
def test_amx_adds_to_some_types_and_takes_no_stacks_of_experts(model: str, tmp_path: Path) -> None:
    it = candidate_of(open_model(write_model(model, tmp_path)))
    board = cpu(*EPYC, "amx_int8")
    assert planned(it, board, "none") / 1024 == pytest.approx(AMX_KIB[model], rel=0.001)
    beside = planned(it, board, "mmap") - planned(it, cpu(), "mmap")
    assert beside >= planned(it, board, "none") - it.weights.file_bytes


def test_what_a_model_repacks_depends_on_board_and_engine() -> None:
    assert MODELS.keys() >= AMX_KIB.keys()
    own, embedded = shapes.engine(), replace(shapes.engine(), kind="embedded")
    assert "Q8_0" in repacked_types(cpu("avx2", "amx_int8"), own)
    assert "Q8_0" not in repacked_types(cpu("avx2", "amx_int8"), embedded)
    assert repacked_types(cpu("asimd"), own) == frozenset()
    assert "Q8_0" in repacked_types(cpu("asimd", "asimddp"), own)
