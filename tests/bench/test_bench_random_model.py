"""Models of random weights: their blocks are what llama.cpp reads, with weights that keep activations finite."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edge.models.header import read_header
from tests.bench.random_model import NAMES, data, header
from tests.fakes.gguf_writer import TYPES


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_K", "Q6_K"])
def test_weights_have_the_variance_that_keeps_activations_finite(kind: str) -> None:
    row, rows = 5120, 64
    number, block, size = TYPES[kind]
    raw = b"".join(data(kind, row * rows // block * size, row, np.random.default_rng(1)))
    weights = gguf.quants.dequantize(np.frombuffer(raw, np.uint8).reshape(rows, -1), gguf.GGMLQuantizationType(number))
    assert weights.shape == (rows, row) and np.isfinite(weights).all()
    assert abs(weights.mean()) < 0.05 / row**0.5
    assert weights.std() == pytest.approx(1 / row**0.5, rel=0.05)


def test_q5_k_m_is_the_mixture_of_llama_quantize(tmp_path: Path) -> None:
    file = header(8.72, "Q5_K_M")
    meta = read_header(file.save_sparse(tmp_path / "m.gguf"))
    assert (meta.arch, meta.n_layer, meta.n_vocab) == ("llama", 40, 131072)
    types = {tensor.name: NAMES[tensor.type] for tensor in file.tensors}
    assert sum(tensor.size for tensor in file.tensors) == pytest.approx(8.72e9, rel=0.01)
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q5_K"
    better = [layer for layer in range(40) if types[f"blk.{layer}.ffn_down.weight"] == "Q6_K"]
    # llama-quant.cpp, use_more_bits: the first and the last eighth, and every third between.
    assert better == [*range(5), *range(7, 35, 3), *range(35, 40)]
    assert better == [layer for layer in range(40) if types[f"blk.{layer}.attn_v.weight"] == "Q6_K"]
    assert {types[f"blk.7.attn_{name}.weight"] for name in ("q", "k", "output")} == {"Q5_K"}
