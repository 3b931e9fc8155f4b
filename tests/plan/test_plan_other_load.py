"""Other processes keep cores busy: the record of telemetry, and the threads of the next plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.plan.other_load import WINDOW, LoadWatch, free_cores, keep_busy_cores, read_busy_cores


def fill(watch: LoadWatch, ratio: float, count: int = WINDOW) -> list[int]:
    """Return the changes."""
    return [cores for _ in range(count) if (cores := watch.add(ratio)) is not None]


def test_the_median_of_a_whole_window_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "data/other_load.json"
    watch = LoadWatch(path, 8)
    assert not fill(watch, 0.26, WINDOW - 1)
    assert watch.add(0.26) == 2, "2.08 of 8 cores"
    assert keep_busy_cores(path, 2) and read_busy_cores(path) == 2
    assert not fill(LoadWatch(path, 8), 0.26), "the same load, after a restart, is no news"


def test_a_build_of_a_minute_and_a_missing_value_change_nothing(tmp_path: Path) -> None:
    watch = LoadWatch(tmp_path / "l.json", 8)
    assert watch.add(None) is None
    assert not [*fill(watch, 1.0, WINDOW // 3), *fill(watch, 0.01, WINDOW - WINDOW // 3)]


def test_a_load_between_two_numbers_stays_at_one_of_them(tmp_path: Path) -> None:
    watch = LoadWatch(tmp_path / "l.json", 4)
    assert fill(watch, 0.2) == [1], "0.8 cores are one"
    for ratio in (0.3, 0.4, 0.12, 0.42):
        assert not fill(watch, ratio)
    assert fill(watch, 0.05) == [0]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 2, "busy_cores": 3}', '{"schema": 1, "busy_cores": "x"}'])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.json").write_text(text)
    assert read_busy_cores(tmp_path / "l.json") == 0
    (tmp_path / "l.json").write_text(json.dumps({"schema": 1, "busy_cores": -4}))
    assert read_busy_cores(tmp_path / "l.json") == 0


def test_a_disk_that_is_full_costs_only_the_record(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    assert fill(LoadWatch(tmp_path / "data/l.json", 4), 0.5) == [2]
    assert not keep_busy_cores(tmp_path / "data/l.json", 2)


@pytest.mark.parametrize(
    ("cores", "busy", "threads"), [(2, 0, 2), (2, 1, 1), (2, 2, 2), (6, 2, 4), (6, 9, 6), (1, 1, 1)]
)
def test_one_thread_a_free_core_and_all_where_none_is_free(cores: int, busy: int, threads: int) -> None:
    assert free_cores(cores, busy) == threads
