"""Engines come and go by renames."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.builder import install
from edge.builder.install import locked
from edge.engine.embedded_engine import find_embedded
from edge.engine.installed import SelectedEngine, catalogue, find_same, ids, read_selection, write_selection
from edge.errors import EngineBrokenError, EngineMissingError, UsageError
from edge.paths import Folders
from tests.builder.installing import put


def test_use_and_rollback_swap(places: Folders) -> None:
    for engine_id in ("a", "b"):
        put(places.engines, engine_id)
    assert install.use(places.engines, "a") == SelectedEngine("a", None)
    assert install.use(places.engines, "b") == SelectedEngine("b", "a")
    assert install.use(places.engines, "b") == SelectedEngine("b", "a"), "again changes nothing"
    assert install.rollback(places.engines) == SelectedEngine("a", "b")
    assert install.rollback(places.engines) == SelectedEngine("b", "a")


def test_rollback_from_the_first_engine_goes_to_the_embedded_one(places: Folders) -> None:
    put(places.engines, "a")
    install.use(places.engines, "a")
    assert install.rollback(places.engines) == SelectedEngine(None, "a")
    assert install.rollback(places.engines) == SelectedEngine("a", None)


def test_rollback_without_anything(places: Folders) -> None:
    with pytest.raises(EngineMissingError):
        install.rollback(places.engines)


def test_rollback_without_an_embedded_engine(places: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    put(places.engines, "a")
    install.use(places.engines, "a")
    monkeypatch.setattr(install, "find_embedded", lambda python: None)
    with pytest.raises(EngineMissingError, match="no former"):
        install.rollback(places.engines)
    assert read_selection(places.engines) == SelectedEngine("a", None)


def test_nothing_broken_or_absent_is_ever_selected(places: Folders) -> None:
    put(places.engines, "good")
    (put(places.engines, "bad") / "bin/llama-server").unlink()
    install.use(places.engines, "good")
    for engine_id, error in (("bad", EngineBrokenError), ("absent", EngineMissingError)):
        with pytest.raises(error):
            install.use(places.engines, engine_id)
    write_selection(places.engines, SelectedEngine("good", "bad"))
    with pytest.raises(EngineBrokenError):
        install.rollback(places.engines)
    assert read_selection(places.engines).current == "good"


def test_remove(places: Folders) -> None:
    for engine_id in ("a", "b", "c"):
        put(places.engines, engine_id)
    install.use(places.engines, "a")
    install.use(places.engines, "b")
    build = places.cache / "build/fingerprint-a"
    build.mkdir(parents=True)
    with pytest.raises(UsageError, match="in use"):
        install.remove(places.engines, "b")
    install.remove(places.engines, "a", places.cache / "build")
    assert read_selection(places.engines) == SelectedEngine("b", None)
    assert not build.exists(), "its build folder goes too"
    install.remove(places.engines, "c")
    assert ids(places.engines) == ["b"]
    for odd in ("a", "../state", "", ".lock"):
        with pytest.raises(EngineMissingError):
            install.remove(places.engines, odd)
    embedded = find_embedded(sys.executable)
    assert embedded is not None
    for name in ("embedded", embedded.id):
        with pytest.raises(EngineMissingError, match="Python package xllamacpp") as caught:
            install.remove(places.engines, name)
        assert caught.value.hint is not None and "pip uninstall xllamacpp" in caught.value.hint


def test_broken_engines_can_be_listed_and_removed(places: Folders) -> None:
    folder = put(places.engines, "bad")
    put(places.engines, "good")
    (folder / "engine.json").write_text("{")
    entries = {entry["id"]: entry for entry in catalogue(places.engines)["engines"]}
    assert "broken" in entries["bad"] and "broken" not in entries["good"]
    install.remove(places.engines, "bad")
    assert ids(places.engines) == ["good"]


def test_the_catalogue_names_the_embedded_engine_when_none_is_selected(places: Folders) -> None:
    embedded = find_embedded(sys.executable)
    assert embedded is not None
    document = catalogue(places.engines)
    assert document["current"] == document["embedded"] == embedded.id
    assert document["schema"] == 1 and document["engines"] == []


def test_leftovers_of_a_crash_go_with_the_next_build(places: Folders) -> None:
    (places.engines / ".new-999999/bin").mkdir(parents=True)
    with install.staging(places.engines) as folder:
        assert folder.is_dir()
        assert [entry.name for entry in places.engines.glob(".new-*")] == [folder.name]
    assert list(places.engines.glob(".new-*")) == []


def test_ids_count_up(places: Folders) -> None:
    assert install.new_id(places.engines, "0c1e57098bba", "cpu") == "0c1e57098-cpu-1"
    for number in (1, 2, 10):
        put(places.engines, f"0c1e57098-cpu-{number}")
    assert install.new_id(places.engines, "0c1e57098bba", "cpu") == "0c1e57098-cpu-11"
    assert install.new_id(places.engines, "0c1e57098bba", "my recipe/x") == "0c1e57098-my-recipe-x-1"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["use a", "use b", "use c", "rollback"]), max_size=12))
def test_whatever_is_done_two_rollbacks_change_nothing(steps: list[str]) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as name:
        engines = Path(name)
        for engine_id in ("a", "b", "c"):
            put(engines, engine_id)
        install.use(engines, "a")
        for step in steps:
            before = read_selection(engines)
            if step == "rollback":
                install.rollback(engines)
                assert read_selection(engines) == SelectedEngine(before.previous, before.current)
            else:
                after = install.use(engines, step.removeprefix("use "))
                assert after.current == step.removeprefix("use ")
                assert after.previous == (before.current if before.current != after.current else before.previous)


def test_no_other_user_can_hold_the_lock_of_the_engines(tmp_path: Path) -> None:
    os.close(os.open(tmp_path / ".lock", os.O_CREAT, 0o644))  # of an earlier edgellm
    with locked(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o077 == 0


def test_an_engine_on_a_disk_that_fails_takes_no_list_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO, ESTALE, or a folder that this user may not enter: the others are listed, this one with the reason."""
    for name in ("good-1", "bad-1"):
        put(tmp_path, name)
    (tmp_path / "no-engine").mkdir()
    real = Path.stat

    def stat(path: Path, **more: Any) -> os.stat_result:
        if "bad-1" in path.parts:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, **more)

    monkeypatch.setattr(Path, "stat", stat)
    assert ids(tmp_path) == ["bad-1", "good-1"]
    bad, good = catalogue(tmp_path)["engines"]
    assert "Input/output error" in bad["broken"] and "broken" not in good
    assert find_same(tmp_path, "fingerprint", "fingerprint-good-1") == "good-1"
