"""profiles/boards.toml: every row says where it comes from, and no part number means two boards."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.board.named import board_by_id, board_ids
from edge.board.tables import board_reference, load, table
from edge.errors import BugError, UsageError


def test_every_row_has_a_source_and_says_how_far_it_may_be_believed() -> None:
    for row in table().rows:
        assert row.source, row.id
        assert row.trust in ("measured", "reported", "datasheet"), row.id
        assert row.memory_trust in ("measured", "reported", "reconstructed"), row.id
        assert row.soc in table().socs, row.id
    for soc in table().socs.values():
        assert soc.source
        assert soc.trust in ("measured", "reported", "datasheet")


def test_faults_and_drivers_have_sources() -> None:
    assert all(issue.source for issue in board_reference().issues)
    assert all(driver.source for driver in board_reference().drivers)
    oldest = [int(driver.oldest) for driver in board_reference().drivers]
    assert oldest == sorted(oldest, reverse=True)


def test_part_numbers_and_names_are_unique() -> None:
    parts = [part for row in table().rows for part in row.part]
    names = [name for row in table().rows for name in (row.id, *row.aliases)] + [
        m.id for m in board_reference().machines
    ]
    assert len(parts) == len(set(parts))
    assert len(names) == len(set(names))


def test_releases_are_in_order_and_newer_ones_bring_no_older_cuda() -> None:
    releases = table().releases
    assert list(releases) == sorted(releases, key=lambda release: release.version)
    cudas = [float(release.cuda) for release in releases]
    assert cudas == sorted(cudas)


@pytest.mark.parametrize("name", [*board_ids(), "thor", "agx-orin", "orin-nano", "orin-nx", "Orin-Nano-8-Super"])
def test_every_name_gives_a_board(name: str) -> None:
    board = board_by_id(name)
    assert board.memory_bytes > 3 * 2**30
    assert board.cpu.physical_cores >= 4


def test_super_has_the_faster_memory() -> None:
    plain, fast = board_by_id("orin-nano-8"), board_by_id("orin-nano-8-super")
    assert (plain.bandwidth_bytes_s, fast.bandwidth_bytes_s) == (pytest.approx(68.3e9), pytest.approx(102.4e9))


def test_a_wrong_name_gets_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="agx-orn-64") as caught:
        board_by_id("agx-orn-64")
    assert caught.value.hint == "did you mean agx-orin-64?"


def test_a_broken_table_is_our_fault(tmp_path: Path) -> None:
    path = tmp_path / "boards.toml"
    path.write_text("[soc.x]\nname = 1\n")
    with pytest.raises(BugError):
        load(path)
