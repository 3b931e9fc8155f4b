"""`speculation = "auto"`: what was measured for this board, engine and model, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.config.values import Preset
from edge.plan.choices import NOT_MEASURED, DraftChoice, measured_drafts, model_key, read_choices, write_choice
from tests.plan import shapes

FILE = shapes.model("Small")
AUTO = Preset(speculation="auto")


def choice(way: str = "ngram", **changes: str) -> DraftChoice:
    return replace(DraftChoice("orin", "e1", model_key(FILE), way, 30.0, 20.0), **changes)


def test_a_choice_is_kept_by_board_engine_and_model_and_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "data/drafting.json"
    for each in (choice("mtp"), choice("ngram"), choice("off", engine="e2"), choice("mtp", model="Other Q4_0 1")):
        write_choice(path, each)
    assert read_choices(path, DraftChoice, "orin", "e1") == (choice("ngram"), choice("mtp", model="Other Q4_0 1"))
    assert read_choices(path, DraftChoice, "orin", "e3") == read_choices(path, DraftChoice, "thor", "e1") == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "choices": []}', '{"schema": 1, "choices": [{}]}'])
def test_a_damaged_file_is_no_choice(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    assert read_choices(tmp_path / "d.json", DraftChoice, "orin", "e1") == ()


def test_auto_is_what_was_measured_for_this_model() -> None:
    for way in ("ngram", "mtp", "off"):
        preset, notes = measured_drafts(AUTO, FILE, [choice("mtp", model="Other Q4_0 1"), choice(way)])
        assert (preset.speculation, notes) == (way, ())
    assert measured_drafts(AUTO, FILE, [choice("a way of a newer edgellm")])[0].speculation == "off"


def test_auto_without_a_measurement_drafts_nothing_and_is_noted() -> None:
    preset, notes = measured_drafts(AUTO, FILE, [choice(model="Other Q4_0 1")])
    assert (preset.speculation, notes) == ("off", (NOT_MEASURED,))


@pytest.mark.parametrize("way", ["off", "ngram", "mtp"])
def test_a_way_that_was_asked_for_stays(way: str) -> None:
    preset = replace(AUTO, speculation=way)
    assert measured_drafts(preset, FILE, [choice("off")]) == (preset, ())
