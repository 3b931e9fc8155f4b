"""check --deep: every byte is hashed, every scale looked at."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from msgspec.structs import replace

from edge.cli import main
from edge.models import check
from edge.models.check import FORMATS, SCALES, check_deep, compare_headers
from edge.models.header import read_header
from edge.models.install import import_model
from edge.models.meta import ModelMeta
from edge.models.open import open_model
from edge.models.quant import TENSOR_TYPES
from tests.fakes.gguf_writer import Gguf, save_set

SIZES = {kind.name: (kind.block, kind.bytes) for kind in TENSOR_TYPES.values()}
# Their scales cannot be told from the bytes of one field, or cannot be no number.
UNSCANNED = {"IQ1_M", "NVFP4", "I8", "I16", "I32", "I64"}
# The package knows their sizes but not how to read them.
UNREADABLE = {"Q8_1", "Q8_K", "F64", "Q1_0", "Q2_0"}
KINDS = [kind for kind in gguf.GGMLQuantizationType if kind.name not in UNSCANNED | UNREADABLE]


def test_every_type_has_its_scales_or_a_reason() -> None:
    assert set(SCALES) | UNSCANNED == set(SIZES)
    for name, fields in SCALES.items():
        for offset, form in fields:
            assert offset + np.dtype(FORMATS[form][0]).itemsize <= SIZES[name][1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_scales_are_where_the_package_reads_them(kind: gguf.GGMLQuantizationType) -> None:
    """A NaN there, and only there, makes the package's own dequantizer give NaN."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(1)
    sound = rng.integers(0, 60, (4, max(size, 1)), np.uint8)  # small bytes: no float made of them is special
    values = dequantize(sound.copy(), kind)
    assert np.isfinite(values).all()
    for offset, form in SCALES[kind.name]:
        if form == "e8m0":
            continue  # ggml clamps it; by the format 255 is no number
        bad = sound.copy()
        numpy_type, _, limit = FORMATS[form]
        bad[2, offset : offset + np.dtype(numpy_type).itemsize] = np.array([limit + 1], numpy_type).view(np.uint8)
        with np.errstate(invalid="ignore"):
            values = dequantize(bad, kind)
        assert np.isnan(values[2]).any(), (kind.name, offset)
        assert np.isfinite(np.delete(values, 2, 0)).all()


@pytest.mark.parametrize("name", sorted(SCALES))
def test_one_bad_scale_is_found_and_counted(tmp_path: Path, name: str) -> None:
    block, size = SIZES[name]
    number = next(number for number, kind in TENSOR_TYPES.items() if kind.name == name)
    gguf_file = Gguf("llama").model(n_layer=1)
    columns = 3 * block if block > 1 else 96
    gguf_file.tensors.append(_spec("bad.weight", (columns, 700), number, columns * 700 // block * size))
    path = gguf_file.save(tmp_path / "m.gguf")
    assert check_deep(open_model(path)).healthy
    tensor = next(t for t in open_model(path).meta.tensors if t.name == "bad.weight")
    offset, form = SCALES[name][-1]
    kind, _, limit = FORMATS[form]
    with path.open("r+b") as file:
        for at in (0, 1, columns * 700 // block - 1):
            file.seek(open_model(path).meta.data_offset + tensor.offset + at * size + offset)
            file.write(np.array([limit], kind).tobytes())
    report = check_deep(open_model(path))
    assert [(bad.name, bad.type, bad.scales) for bad in report.bad] == [("bad.weight", name, 3)]
    assert not report.healthy


def _spec(name: str, dims: tuple[int, ...], number: int, size: int) -> object:
    from tests.fakes.gguf_writer import TensorSpec

    return TensorSpec(name, dims, number, size)


def test_hashes_every_byte_once_and_compares_with_the_receipt(tmp_path: Path) -> None:
    """FC-49: a byte that changed on disk is found, wherever it is."""
    path = Gguf("llama", fill=3).model(n_layer=20, vocab=1000).save(tmp_path / "in" / "m-Q5_K_M.gguf")
    model = import_model(path, tmp_path / "models")
    report = check_deep(model)
    assert report.healthy
    assert report.files[0].sha256 == report.files[0].recorded == hashlib.sha256(path.read_bytes()).hexdigest()
    assert report.tensors == len(model.meta.tensors)
    with Path(model.path).open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\0")
    assert not check_deep(open_model(Path(model.path))).healthy


def test_progress_covers_the_whole_set(tmp_path: Path) -> None:
    first = save_set(tmp_path, "big-Q5_K_M", 3)[0]
    seen: list[int] = []
    report = check_deep(open_model(first), lambda step: seen.append(step.done_bytes))
    assert len(report.files) == 3
    assert [file.expected for file in report.files] == [None] * 3
    assert seen[-1] == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_the_real_smollm2_is_healthy(smollm2: Path) -> None:
    report = check_deep(open_model(smollm2))
    assert report.healthy and report.tensors == 272
    assert report.files[0].recorded == report.files[0].sha256


@pytest.mark.parametrize(
    "changed",
    [{"type": "Q4_0"}, {"shape": (64, 9)}, {"offset": 32}, {"name": "renamed.weight"}],
    ids=lambda one: str(one),
)
def test_a_header_that_the_package_gguf_reads_otherwise_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: dict[str, object]
) -> None:
    """One value of our reader is changed: the other reader must see it."""

    def other(path: Path) -> ModelMeta:
        meta = read_header(path)
        return replace(meta, tensors=(replace(meta.tensors[0], **changed), *meta.tensors[1:]))

    path = Gguf("llama").model().save(tmp_path / "m-Q5_K_M.gguf")
    meta = read_header(path)
    assert compare_headers(path, meta) == []
    (*differences,) = compare_headers(path, other(path)) or ()
    assert len(differences) == (2 if "name" in changed else 1)
    assert any(f"{meta.tensors[0].name}: " in line for line in differences)
    monkeypatch.setattr(check, "compare_headers", lambda path, _: compare_headers(path, other(path)))
    report = check_deep(open_model(path))
    assert not report.healthy and report.differences == tuple(differences)
    assert main(["model", "check", "--deep", str(path)]) == 65
    assert " in gguf" in capsys.readouterr().out
