"""Pages of a model's file: read ahead at boot where that was measured to help, given back once the engine has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.config.values import Preset
from edge.daemon.boot_prefetch import files_to_read, read_ahead
from edge.daemon.fleet import give_pages_back, gives_pages_back
from edge.daemon.remembered_launch import EngineCommand, RememberedLaunch, identity, record_path
from edge.linux.procfs import resident_ratio
from edge.paths import Folders
from edge.plan.plan import Ladder, LaunchPlan, ModelPlan
from tests.linux.test_prefetch import dropped
from tests.supervisor.rig import FILE, launch_plan, settings


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(9 << 20))
    return dropped(path)


def remembered(path: Path, least_bytes: int | None, *argv: str) -> RememberedLaunch:
    model = EngineCommand(["llama-server", *argv], {}, [0, 500, []], [str(path)], least_bytes, {})
    return RememberedLaunch([], "/", {}, [], False, {str(path): identity(str(path))}, {}, [], 0, {"chat": model})


def test_the_file_is_read(places: Folders, cold: Path) -> None:
    remembered(cold, 0).write(record_path(places))
    assert read_ahead(places) > 0 and (resident_ratio(cold) or 0.0) > 0.99


@pytest.mark.parametrize(
    "argv",
    [
        ("--load-mode", "dio"),
        ("--direct-io",),
        ("--params", '{"load_mode":"dio","n_ctx":4096}'),
    ],
)
def test_an_engine_that_reads_past_the_page_cache_gets_nothing(cold: Path, argv: tuple[str, ...]) -> None:
    assert list(files_to_read(remembered(cold, 0, *argv))) == []


def test_nothing_is_read_where_it_was_not_measured_to_help(places: Folders, cold: Path) -> None:
    remembered(cold, None).write(record_path(places))
    assert read_ahead(places) == 0 and resident_ratio(cold) == 0.0


def test_memory_for_others_stays_free(places: Folders, cold: Path) -> None:
    remembered(cold, 1 << 62).write(record_path(places))
    assert read_ahead(places) == 0 and resident_ratio(cold) == 0.0


def test_a_file_that_changed_since_is_not_read(places: Folders, cold: Path) -> None:
    remembered(cold, 0).write(record_path(places))
    os.utime(cold, (1, 1))
    assert read_ahead(places) == 0 and resident_ratio(cold) == 0.0


def test_without_a_record_or_with_a_damaged_one_nothing_happens(places: Folders) -> None:
    assert read_ahead(places) == 0
    record_path(places).parent.mkdir(parents=True)
    record_path(places).write_text("{")
    assert read_ahead(places) == 0


def prepared_plan(domain: str, load_mode: str) -> LaunchPlan:
    plan = launch_plan(("x",), 0, settings(load_mode=load_mode))
    return replace(plan, budget={domain: next(iter(plan.budget.values()))})


@pytest.mark.parametrize(
    ("domain", "load_mode", "keep_cached", "expected"),
    [
        ("unified", "none", False, True),
        ("unified", "none", True, False),
        ("unified", "mmap", False, False),
        ("unified", "dio", False, False),
        ("host", "none", False, False),
    ],
)
def test_pages_are_given_back_where_they_are_a_second_copy(
    domain: str, load_mode: str, keep_cached: bool, expected: bool
) -> None:
    assert gives_pages_back(prepared_plan(domain, load_mode), Preset(keep_cached=keep_cached)) is expected


def test_after_it_no_page_of_the_file_is_in_the_page_cache(cold: Path) -> None:
    cold.read_bytes()
    assert (resident_ratio(cold) or 0.0) > 0.99
    plan = prepared_plan("unified", "none")
    file = replace(FILE, path=str(cold), shards=(str(cold), "/nowhere/second.gguf"))
    give_pages_back(plan, ModelPlan("chat", (), file, Ladder((plan,), 0)))
    assert resident_ratio(cold) == 0.0
