"""FC-61 and FC-52: projectors are recognized by their header and paired only if the choice is unambiguous."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.errors import BadModelError
from edge.models.open import open_model
from edge.models.projector import read_projector
from edge.models.store import Store
from edge.models.survey import survey
from tests.fakes.gguf_writer import Gguf


def model(path: Path) -> Path:
    return Gguf("llama").model().save(path)


def proj(path: Path) -> Path:
    return Gguf("clip").projector().save(path)


def chosen(path: Path) -> str | None:
    """By opening, which must agree with the list."""
    opened = open_model(path)
    line = next(line for line in survey(Store(path.parent)) if line.entry.path == path)
    assert (str(line.mmproj) if line.mmproj else None) == opened.mmproj
    assert set(opened.notes) == set(line.notes)
    return Path(opened.mmproj).name if opened.mmproj else None


def test_fc52_one_model_one_projector_that_sorts_first_and_is_bigger(tmp_path: Path) -> None:
    """FC-52: the projector is never taken for the model; being alone, it is paired."""
    path = model(tmp_path / "zebra-Q5_K_M.gguf")
    big = Gguf("clip").projector().tensor("v.big", 1024, 1024).save(tmp_path / "a-projector.gguf")
    assert big.stat().st_size > path.stat().st_size
    assert [line.id for line in survey(Store(tmp_path)) if line.usable] == ["zebra:Q5_K_M"]
    assert chosen(path) == "a-projector.gguf"


@pytest.mark.parametrize("stem", ["mmproj-x", "x-mmproj", "x.mmproj-Q8_0", "mmproj-X-F16", "x_mmproj_f16"])
def test_fc61_names_of_projectors(tmp_path: Path, stem: str) -> None:
    """FC-61: each way of naming is paired with the model of that name, beside another model."""
    path, other = model(tmp_path / "x-Q5_K_M.gguf"), model(tmp_path / "y-Q5_K_M.gguf")
    proj(tmp_path / f"{stem}.gguf")
    assert chosen(path) == f"{stem}.gguf"
    assert chosen(other) is None


def test_fc61_two_models_and_three_projectors(tmp_path: Path) -> None:
    """FC-61: no guess where two fit; the note names them."""
    x, y = model(tmp_path / "x-Q5_K_M.gguf"), model(tmp_path / "y-Q5_K_M.gguf")
    for name in ("mmproj-x.gguf", "x-mmproj.gguf", "y.mmproj-Q8_0.gguf"):
        proj(tmp_path / name)
    assert chosen(x) is None
    assert any("mmproj-x.gguf, x-mmproj.gguf" in note for note in open_model(x).notes)
    assert chosen(y) == "y.mmproj-Q8_0.gguf"


def test_fc61_a_nameless_projector_of_a_lone_model(tmp_path: Path) -> None:
    path = model(tmp_path / "x-Q5_K_M.gguf")
    Gguf("llama").model(type="Q4_K", file_type=15).save(tmp_path / "x-Q4_K_M.gguf")  # the same model again
    proj(tmp_path / "mmproj-F16.gguf")
    assert chosen(path) == "mmproj-F16.gguf"
    model(tmp_path / "other-Q4_K_M.gguf")
    assert chosen(path) is None


def test_fc61_a_projector_by_header_although_its_name_hides_it(tmp_path: Path) -> None:
    """FC-61: `clip-vision` in the header counts, `mmproj` in a model's name does not."""
    path = model(tmp_path / "mmproj-fan-Q5_K_M.gguf")
    Gguf("clip").set("general.type", "clip-vision").tensor("v", 32, 32).save(tmp_path / "eyes.gguf")
    assert chosen(path) == "eyes.gguf"


def test_fc61_two_precisions_are_a_choice(tmp_path: Path) -> None:
    path = model(tmp_path / "x-Q5_K_M.gguf")
    proj(tmp_path / "mmproj-x-F16.gguf")
    proj(tmp_path / "mmproj-x-Q8_0.gguf")
    assert chosen(path) is None


def test_fc61_a_broken_projector_does_not_stop_its_model(tmp_path: Path) -> None:
    """The model serves without it, with a note."""
    path, eyes = model(tmp_path / "x-Q5_K_M.gguf"), proj(tmp_path / "mmproj-x.gguf")
    eyes.write_bytes(eyes.read_bytes()[:-5000])
    opened = open_model(path)
    assert opened.mmproj is None and opened.mmproj_bytes == 0
    assert any("truncated" in note for note in opened.notes)


def test_fc52_a_projector_is_no_entry_to_choose(tmp_path: Path) -> None:
    """FC-52: a list by names alone does not take it for a model either."""
    model(tmp_path / "x-Q5_K_M.gguf")
    proj(tmp_path / "mmproj-x-F16.gguf")
    assert [entry.id for entry in Store(tmp_path).list() if entry.verdict is None] == ["x:Q5_K_M"]


def test_fc61_the_projector_is_in_the_sum_and_a_named_one_is_checked(tmp_path: Path) -> None:
    path, eyes = model(tmp_path / "x-Q5_K_M.gguf"), proj(tmp_path / "mmproj-x.gguf")
    opened = open_model(path)
    assert opened.mmproj_bytes == read_projector(eyes, opened.meta).tensor_bytes == 32 * 32 * 4 + 32 * 256 * 4
    with pytest.raises(BadModelError, match="not a projector"):
        read_projector(path, opened.meta)


@pytest.mark.parametrize("width", [128, 2048])
def test_fc61_a_projector_for_another_model_is_told_by_both_headers(tmp_path: Path, width: int) -> None:
    """llama.cpp refuses it with `mismatch between text model and mmproj`, and the whole start with it."""
    path = model(tmp_path / "x-Q5_K_M.gguf")
    eyes = Gguf("clip").projector(width).save(tmp_path / "mmproj-x.gguf")
    opened = open_model(path)
    assert opened.mmproj is None and any("for another model" in note for note in opened.notes)
    with pytest.raises(BadModelError, match=f"vectors of {width} values, not of {opened.meta.n_embd}"):
        read_projector(eyes, opened.meta)
