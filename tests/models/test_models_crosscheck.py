"""The reader against the PyPI package `gguf`, which is llama.cpp's own: same tables, same fields, same tensors."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from edge.models import quant
from edge.models.header import read_header
from edge.models.meta import ModelMeta
from edge.models.quant import FILE_TYPES, TENSOR_TYPES, base_types


def test_tensor_types_are_those_of_the_package() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {number: (kind.name, kind.block, kind.bytes) for number, kind in TENSOR_TYPES.items()}
    assert theirs.items() <= ours.items()


def test_file_types_are_those_of_the_package() -> None:
    for kind in gguf.LlamaFileType:
        if kind.name == "GUESSED":
            continue
        told = kind.name.removeprefix("MOSTLY_").removeprefix("ALL_").removesuffix("_MOE")
        assert FILE_TYPES[kind.value] == told


def test_each_mix_is_named_after_tensor_types_that_exist() -> None:
    names = {kind.name for kind in TENSOR_TYPES.values()}
    for label in FILE_TYPES.values():
        assert base_types(label) <= names


def test_architectures_are_those_of_the_package() -> None:
    assert set(gguf.MODEL_ARCH_NAMES.values()) <= quant.KNOWN


def agree(meta: ModelMeta, path: Path) -> None:
    """Every tensor and every scalar key as GGUFReader has them."""
    reader = gguf.GGUFReader(path)
    assert meta.data_offset == reader.data_offset
    assert len(meta.tensors) == len(reader.tensors)
    for ours, theirs in zip(meta.tensors, reader.tensors, strict=True):
        assert (ours.name, ours.type) == (theirs.name, theirs.tensor_type.name)
        assert list(ours.shape) == theirs.shape.tolist()
        assert ours.bytes == int(theirs.n_bytes)
        assert ours.offset + meta.data_offset == int(theirs.data_offset)
    scalars = 0
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or field.types[0] == gguf.GGUFValueType.ARRAY:
            continue
        if key in meta.extra:
            assert meta.extra[key] == field.contents()
            scalars += 1
        else:
            assert len(field.contents()) > 4096
    assert scalars == len(meta.extra)
    for key, values in meta.arrays.items():
        assert list(values) == reader.fields[key].contents()


def test_the_real_smollm2(smollm2: Path) -> None:
    meta = read_header(smollm2)
    agree(meta, smollm2)
    assert (meta.arch, meta.n_layer, meta.n_embd, meta.n_head, meta.n_head_kv) == ("llama", 30, 576, 9, (3,) * 30)
    assert (meta.quant, meta.n_ctx_train, meta.n_vocab, meta.file_bytes) == ("Q4_1", 8192, 49152, 98362432)


@pytest.mark.parametrize("endian", [gguf.GGUFEndian.LITTLE])
def test_every_value_type_as_their_writer_writes_it(tmp_path: Path, endian: gguf.GGUFEndian) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count([4, 4])
    writer.add_head_count_kv([2, 0])
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -300)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("words", "Grüße 字")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["a", "bc", ""])
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.ones((3, 32), np.float32))
    writer.add_tensor("b", np.zeros((5, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c", np.ones(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    meta = read_header(path)
    agree(meta, path)
    assert meta.n_head_kv == (2, 0)


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType))
def test_size_of_each_tensor_type_as_their_reader_counts_it(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16) or block == 1:
        types = {1: np.int8, 2: np.float16, 4: np.float32, 8: np.float64}
        writer.add_tensor("t", np.zeros((3, 4), types[size]))
    else:
        writer.add_tensor("t", np.zeros((3, 2 * size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    agree(read_header(path), path)


@pytest.mark.full
def test_vocabulary_files_of_the_llama_cpp_tree(llama_cpp_tree: Path) -> None:
    """The tree's own vocab-only files: another writer's, with every tokenizer there is."""
    files = sorted((llama_cpp_tree / "models").glob("ggml-vocab-*.gguf"))
    assert len(files) > 10
    for path in files:
        meta = read_header(path)
        assert meta.kind == "vocab" and meta.n_vocab and meta.tokenizer
        if meta.file_bytes < 2_000_000:  # the package takes a minute for the large ones
            agree(meta, path)
