"""The shipped catalogue: every row is whole, and nothing in it contradicts itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge.board.memory import room_bytes
from edge.errors import ConfigError, DoesNotFitError, UsageError
from edge.models import catalogue, source
from edge.models.catalogue import CatalogueRow, choose, find, load
from edge.models.pick import RemoteFile, options
from edge.models.pull import wanted_of
from edge.models.quant import label_from_name, public_name
from edge.resources import data_dir, load_toml
from edge.units import GIB

ROWS = load()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_are_whole(row: CatalogueRow) -> None:
    assert row.licence and row.family and row.quants
    assert row.role in ("chat", "embedding", "vision")
    assert row.checked == "never" or re.fullmatch(r"\d{4}-\d\d-\d\d", row.checked)
    assert (row.role == "embedding") == (row.pooling is not None)
    assert (row.role == "vision") == (row.mmproj is not None)
    for quant in row.quants:
        assert quant.bytes > 10**7 and quant.looked_up
        assert all(sha is None or re.fullmatch(r"[0-9a-f]{64}", sha) for sha in quant.sha256)
        parsed = source.parse(quant.source)
        assert str(parsed) == quant.source
        if isinstance(parsed, source.HubSource):
            assert parsed.file == quant.files[0].path or parsed.quant == quant.quant
            assert label_from_name(quant.files[0].path) == quant.quant
            assert parsed.revision is None or re.fullmatch(r"[0-9a-f]{40}", parsed.revision)


def test_names_are_unique_and_what_is_pulled_answers_to_them() -> None:
    names = [row.name.lower() for row in ROWS]
    assert len(set(names)) == len(names)
    shas = [sha for row in ROWS for quant in row.quants for sha in quant.sha256 if sha]
    assert len(set(shas)) == len(shas)
    for row in ROWS:
        labels = [quant.quant for quant in row.quants]
        assert len(set(labels)) == len(labels)
        plain = [public_name(quant.files[0].path) for quant in row.quants]
        assert all(name for name in plain)


def test_quants_of_a_row_stand_in_order_of_preference() -> None:
    """Q5_K_M first where there is one: the first that fits is taken."""
    for row in ROWS:
        labels = [quant.quant.removeprefix("UD-") for quant in row.quants]
        if "Q5_K_M" in labels:
            assert labels[0] == "Q5_K_M"


def test_sets_name_all_their_files() -> None:
    for row in ROWS:
        for quant in row.quants:
            files = [RemoteFile(file.path) for file in quant.files]
            (option,) = options(files)
            assert [file.path for file in option.files] == [file.path for file in quant.files]


def test_every_ranked_model_is_in_the_catalogue() -> None:
    ranking = data_dir("profiles") / "ranking.toml"
    for row in load_toml(ranking)["model"]:
        assert find(row["name"]) is not None, row["name"]


def test_the_demo_model_is_pinned_twice() -> None:
    row = find("smollm2-135m-instruct")
    assert row is not None
    (quant,) = row.quants
    assert quant.exact and quant.bytes == 98362432 and quant.wheel_bytes == 92871040
    assert quant.sha256[0] and quant.wheel_sha256
    assert catalogue.by_source(quant.source) == (row, quant)


def test_choose_takes_what_fits() -> None:
    row = find("Qwen3.5-4B")
    assert row is not None
    assert choose(row).quant == "Q5_K_M"
    assert choose(row, room_bytes=4 * GIB).quant == "Q5_K_M"
    assert choose(row, room_bytes=int(2.7 * GIB)).quant == "Q4_K_M"
    assert choose(row, "q8_0", 1).quant == "Q8_0"
    with pytest.raises(DoesNotFitError, match="no quant of Qwen3"):
        choose(row, room_bytes=GIB)
    with pytest.raises(UsageError, match="no Q2_K") as caught:
        choose(row, "Q2_K")
    assert "Q5_K_M" in (caught.value.hint or "")
    big = find("Qwen3.6-35B-A3B")
    assert big is not None and choose(big, "Q4_K_M").quant == "UD-Q4_K_M"


def test_an_orin_nano_gets_what_the_facts_say() -> None:
    """8 GB headless, 6.4 GB available: the 4B in Q5_K_M; with a desktop (5.2 GB) in Q4_K_M."""
    row = find("Qwen3.5-4B")
    assert row is not None
    total = 7_802_736 * 1024
    headless = room_bytes({"unified": total}, {"unified": 6_245_596 * 1024}, "max(1GiB, 10%)")
    assert choose(row, room_bytes=headless).quant == "Q5_K_M"
    desktop = room_bytes({"unified": total}, {"unified": 5_200_000_000}, "max(1GiB, 10%)")
    assert choose(row, room_bytes=desktop).quant == "Q4_K_M"


def test_room_is_that_of_the_memory_weights_go_to() -> None:
    gib = {"host": 32 * GIB, "GPU-a": 8 * GIB, "GPU-b": 12 * GIB}
    assert room_bytes(gib, gib, "1GiB") == 10 * GIB
    assert room_bytes({"host": 8 * GIB}, {"host": GIB}, "1GiB") == 0


def test_names_and_sources_to_fetch() -> None:
    wanted = wanted_of("Qwen3.5-4B:Q4_K_M")
    assert wanted.row is not None and wanted.entry is not None and wanted.entry.quant == "Q4_K_M"
    assert wanted_of("hf://a/b:Q4_0").row is None
    with pytest.raises(UsageError, match="neither a source nor in the catalogue") as caught:
        wanted_of("Nothing-1B")
    assert "--catalogue" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "words"),
    [("schema = 2", "schema 2"), ("not toml", "cannot be read"), ('schema = 1\n[[model]]\nname = "x"', "'x'")],
)
def test_a_broken_catalogue_is_a_configuration_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(path)
