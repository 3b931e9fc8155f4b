"""Quantize: with a process that fails in every way, and (marked full) with llama.cpp's own tool."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.engine.engine import Engine
from edge.errors import BadDataError, DoesNotFitError, EdgeError, EngineMissingError, UsageError
from edge.models.open import ModelFile, open_model
from edge.models.progress import TransferProgress
from edge.models.quantize import quantize, tool_of, will_fall_back
from edge.models.receipt import read
from edge.models.store import Store
from edge.models.verdict import VerdictError
from tests.fakes.gguf_writer import Gguf
from tests.fakes.llama_quantize import install


def source(folder: Path, type: str = "F16", file_type: int = 1, **shape: int) -> ModelFile:
    return open_model(Gguf("llama").model(type=type, file_type=file_type, **shape).save(folder / f"Tiny-{type}.gguf"))


def empty(models: Path) -> bool:
    return not [path for path in models.rglob("*") if path.name != ".partial"]


def test_makes_a_model_of_the_same_name(tmp_path: Path) -> None:
    told: list[TransferProgress] = []
    tool, models = install(tmp_path / "bin", "good"), tmp_path / "models"
    made = quantize(source(tmp_path), "q5_k_m", models, tool, progress=told.append)
    assert made.fallbacks == 3
    assert made.mix == {"F16": 5, "F32": 3}
    assert Store(models).resolve("Tiny").path == made.model.path
    assert Path(made.model.path).name == "Tiny-Q5_K_M.gguf"
    note = read(Path(made.model.path).parent)
    assert note is not None and "Q5_K_M from F16" in note.notes[0]
    argv = (tmp_path / "bin" / "argv").read_text().split("\n")
    assert argv[0] == str(tmp_path / "Tiny-F16.gguf") and argv[2] == "Q5_K_M"
    assert told[0].phase == "quantize" and told[-1].phase == "verify"
    assert list((models / ".partial").iterdir()) == []


def test_what_is_made_already_is_not_made_again(tmp_path: Path) -> None:
    tool = install(tmp_path / "bin", "good")
    model = source(tmp_path)
    first = quantize(model, "Q5_K_M", tmp_path / "models", tool)
    (tmp_path / "bin" / "mode").write_text("fails")
    assert quantize(model, "Q5_K_M", tmp_path / "models", tool).model == first.model


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("fails", EdgeError, "requantizing from type q4_1 is disabled"),
        ("dies", EdgeError, "signal 11"),
        ("torn", VerdictError, "truncated"),
        ("loses", BadDataError, "differs in tensor"),
    ],
)
def test_failures_leave_nothing(tmp_path: Path, mode: str, error: type[EdgeError], words: str) -> None:
    """The tool leaves partial files and may even say that all is well."""
    tool = install(tmp_path / "bin", mode)
    with pytest.raises(error, match=words):
        quantize(source(tmp_path), "Q5_K_M", tmp_path / "models", tool)
    assert empty(tmp_path / "models")


def test_lossy_sources_need_force(tmp_path: Path) -> None:
    tool = install(tmp_path / "bin", "good")
    lossy = source(tmp_path, "Q4_K", 15)
    with pytest.raises(UsageError, match="does not come back") as caught:
        quantize(lossy, "Q8_0", tmp_path / "models", tool)
    assert "--force" in (caught.value.hint or "")
    quantize(lossy, "Q8_0", tmp_path / "models", tool, force=True)
    assert "--allow-requantize" in (tmp_path / "bin" / "argv").read_text()


def test_q8_0_is_good_enough_but_the_tool_must_be_told(tmp_path: Path) -> None:
    tool = install(tmp_path / "bin", "good")
    quantize(source(tmp_path, "Q8_0", 7), "Q5_K_M", tmp_path / "models", tool)
    assert "--allow-requantize" in (tmp_path / "bin" / "argv").read_text()


def test_wishes_that_make_no_sense(tmp_path: Path) -> None:
    tool = install(tmp_path / "bin", "good")
    with pytest.raises(UsageError, match="no quantization is called Q9") as caught:
        quantize(source(tmp_path), "Q9", tmp_path / "models", tool)
    assert "Q5_K_M" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="F16 already"):
        quantize(source(tmp_path), "fp16", tmp_path / "models", tool)


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(DoesNotFitError):
        quantize(source(tmp_path), "Q5_K_M", tmp_path / "models", install(tmp_path / "bin", "good"))
    assert not (tmp_path / "bin" / "argv").exists()


def test_shapes_that_force_fallbacks_are_foreseen(tmp_path: Path) -> None:
    """576 columns are not divided by blocks of 256."""
    odd = source(tmp_path, n_layer=2, n_embd=576, n_head=9, n_head_kv=3)
    assert will_fall_back(odd.meta, "Q5_K_M") == 1 + 2 * 2
    assert will_fall_back(odd.meta, "Q8_0") == 0
    assert will_fall_back(source(tmp_path).meta, "Q5_K_M") == 0


def test_the_tool_lies_beside_the_engine(tmp_path: Path) -> None:
    tool = install(tmp_path / "bin", "good")
    assert tool_of(Engine("x", "llama-server", str(tmp_path / "bin" / "llama-server"))) == tool
    for engine in (
        Engine("y", "llama-server", "/nowhere/llama-server"),
        Engine("z", "embedded", str(tmp_path / "bin/x")),
    ):
        with pytest.raises(EngineMissingError, match="llama-quantize"):
            tool_of(engine)


@pytest.mark.full
def test_the_real_tool_on_the_real_smollm2(smollm2: Path, built_programs: Path, tmp_path: Path) -> None:
    """SmolLM2's 576 columns: 180 of 272 tensors fall back, and the real mix is shown."""
    with pytest.raises(UsageError, match="does not come back"):
        quantize(open_model(smollm2), "F16", tmp_path / "models", built_programs / "llama-quantize")
    whole = quantize(open_model(smollm2), "F16", tmp_path / "models", built_programs / "llama-quantize", force=True)
    assert (whole.model.quant, whole.fallbacks) == ("F16", 0)
    made = quantize(whole.model, "Q5_K_M", tmp_path / "models", built_programs / "llama-quantize")
    assert made.fallbacks == 180
    assert abs(will_fall_back(whole.model.meta, "Q5_K_M") - 180) <= 1
    assert made.mix == {"F32": 61, "Q8_0": 15, "Q5_1": 166, "Q6_K": 14, "Q5_K": 16}
    assert {model.id for model in Store(tmp_path / "models").list()} == {
        "SmolLM2-135M-Instruct:F16",
        "SmolLM2-135M-Instruct:Q5_K_M",
    }


@pytest.mark.full
def test_the_real_tool_refuses_and_leaves_nothing(smollm2: Path, built_programs: Path, tmp_path: Path) -> None:
    """Without --allow-requantize it leaves a partial file and a non-zero exit: forced by hand here."""
    model = open_model(smollm2)
    lie = ModelFile(model.name, "F16", model.path, model.shards, model.bytes, model.fingerprint, _as_f16(model))
    with pytest.raises(EdgeError, match="requantizing from type q4_1 is disabled"):
        quantize(lie, "Q5_K_M", tmp_path / "models", built_programs / "llama-quantize")
    assert empty(tmp_path / "models")


def _as_f16(model: ModelFile) -> object:
    from msgspec.structs import replace

    return replace(model.meta, quant="F16")
