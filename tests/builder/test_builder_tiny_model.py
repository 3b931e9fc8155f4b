"""The tiny model is real GGUF, read by two other readers."""

from __future__ import annotations

from pathlib import Path

import gguf

from edge.builder.tiny_model import Shape, tiny_model, write_tiny_model
from edge.models.header import read_header


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", Shape(n_layer=3))
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.block_count"].contents() == 3
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) % 32 == 0
    names = [tensor.name for tensor in reader.tensors]
    assert len(names) == len(set(names)) == 3 + 9 * 3
    last = reader.tensors[-1]
    assert last.data_offset + last.n_bytes <= path.stat().st_size
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32", "Q8_0"}


def test_our_own_header_reader_takes_it(tmp_path: Path) -> None:
    meta = read_header(write_tiny_model(tmp_path / "tiny.gguf"))
    assert (meta.arch, meta.n_layer) == ("llama", 2)


def test_same_seed_same_bytes() -> None:
    first = b"".join(tiny_model())
    assert first == b"".join(tiny_model())
    assert len(first) < 1_000_000
