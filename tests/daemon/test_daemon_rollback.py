"""Rollback: a new engine that never becomes ready is replaced by the previous one, with a warning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.engine.installed import SelectedEngine, write_selection
from edge.paths import folders
from tests.daemon.served import Served, config_text, install
from tests.fakes.llama_switches import Death, starts
from tests.serving import eventually


class Engines(Served):
    old: Path
    new: Path


@pytest.fixture
def state(short_dir: Path, smollm2: Path) -> Path:
    config = short_dir / "s" / "config" / "edgellm.toml"
    config.parent.mkdir(parents=True)
    # The change is made after the third crash, in the pause before the fourth try.
    config.write_text(config_text(f'id = "chat"\nref = "{smollm2}"', top="[restart]\nbackoff_s = [0, 0, 3]"))
    return short_dir / "s"


@pytest.fixture
def served_once(state: Path) -> Iterator[Path]:
    """The old engine was selected and has been READY."""
    install(state / "data", "old-cpu-1")
    write_selection(state / "data" / "engines", SelectedEngine("old-cpu-1"))
    with Served(state) as up:
        up.wait_for("ok")
    yield state


def engine_of(up: Served) -> dict[str, Any]:
    document = up.wait_for("ok", "degraded")
    model = document["models"]["chat"]
    return {"engine": up.status()["engine"], "degraded": {item["subject"]: item for item in model["degraded"]}}


@pytest.mark.parametrize(
    ("death", "at_least"),
    [
        (Death("line", ["error while loading shared libraries: libggml.so.0: cannot open"], code=127), 1),
        (Death("loading", ["GGML_ASSERT(x) failed"], signal=6), 3),
    ],
    ids=["a permanent failure", "three crashes"],
)
def test_it_gives_way_and_stays_away(served_once: Path, death: Death, at_least: int) -> None:
    new = install(served_once / "data", "new-cpu-2", death=death)
    write_selection(served_once / "data" / "engines", SelectedEngine("new-cpu-2", "old-cpu-1"))
    with Served(served_once) as up:
        found = engine_of(up)
        assert found["engine"] == "old-cpu-1"
        assert found["degraded"]["engine"]["wanted"] == "new-cpu-2"
        assert up.chat().status_code == 200
        assert "serves instead" in up.output
        # On a machine that plans for longer than the pause one more try may have begun.
        tried = len(starts(new))
        assert at_least <= tried <= at_least + 1
    with Served(served_once) as again:
        assert engine_of(again)["engine"] == "old-cpu-1"
        assert len(starts(new)) == tried, "it is not tried again"


def test_the_engine_that_serves_is_not_removed(served_once: Path) -> None:
    """A build has selected another engine since: the running server starts its next child from the old one."""
    with Served(served_once) as up:
        up.wait_for("ok")
        install(served_once / "data", "new-cpu-2")
        write_selection(served_once / "data" / "engines", SelectedEngine("new-cpu-2", "old-cpu-1"))
        refused = up.cli("engine", "remove", "old-cpu-1", rc=64)
        assert (
            f"old-cpu-1 is run by the edgellm in {folders({}, served_once).instance_run}" in refused
            and "--force" in refused
        )
        assert "removed" in up.cli("engine", "remove", "old-cpu-1", "--force")


def test_memory_is_no_reason(served_once: Path) -> None:
    new = install(
        served_once / "data",
        "new-cpu-2",
        first_starts=3,
        first={"death": Death("loading", ["std::bad_alloc"], code=1).__dict__},
    )
    write_selection(served_once / "data" / "engines", SelectedEngine("new-cpu-2", "old-cpu-1"))
    with Served(served_once) as up:
        eventually(lambda: up.healthz().get("status") in ("ok", "degraded"), lambda: up.output)
        assert up.status()["engine"] == "new-cpu-2" and len(starts(new)) >= 2


def test_an_engine_that_was_asked_for_by_name_does_not_give_way(served_once: Path) -> None:
    death = Death("line", ["error while loading shared libraries: libggml.so.0: cannot open"], code=127)
    install(served_once / "data", "new-cpu-2", death=death)
    write_selection(served_once / "data" / "engines", SelectedEngine("new-cpu-2", "old-cpu-1"))
    with Served(served_once, "--engine", "new-cpu-2") as up:
        up.wait_for("failed")
        assert up.status()["models"]["chat"]["failure"]["kind"] == "install_fault"
        assert json.loads((served_once / "data/engines/selected.json").read_text())["current"] == "new-cpu-2"
