"""Which engine a start uses: asked for > selected > embedded, and never the CPU in place of a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edge.engine.choose import choose, fallback_now
from edge.engine.embedded_engine import find_embedded
from edge.engine.installed import SelectedEngine, ids, read_selection, write_selection
from edge.errors import EngineBrokenError, EngineMissingError, UsageError
from edge.paths import Folders
from tests.builder.installing import put
from tests.fakes.toolchain.server import write_server


def test_nothing_built_serves_the_cpu_from_the_embedded_engine(places: Folders) -> None:
    engine = choose(places, None, needs_gpu=False)
    assert engine.kind == "embedded"
    assert engine.id.startswith("embedded-xllamacpp-")


def test_nothing_built_and_a_gpu_wanted_names_the_command_its_time_and_its_disk(places: Folders) -> None:
    with pytest.raises(EngineMissingError) as caught:
        choose(places, None, needs_gpu=True, profile="orin")
    hint = caught.value.hint or ""
    assert "edgellm build -p orin" in hint and " min " in hint and "GiB" in hint
    assert caught.value.exit_code == 69


def test_the_selected_engine_wins_over_the_embedded_one(places: Folders) -> None:
    put(places.engines, "0c1e57098-cpu-1")
    write_selection(places.engines, SelectedEngine("0c1e57098-cpu-1"))
    engine = choose(places, None, needs_gpu=False)
    assert (engine.id, engine.kind, engine.era) == ("0c1e57098-cpu-1", "llama-server", "load-mode")
    assert engine.has("--load-mode") and engine.version == "0.5.0-dev"


def test_a_cpu_engine_is_no_engine_for_a_gpu(places: Folders) -> None:
    put(places.engines, "a-cpu-1")
    write_selection(places.engines, SelectedEngine("a-cpu-1"))
    with pytest.raises(EngineMissingError, match="no CUDA"):
        choose(places, None, needs_gpu=True, profile="cuda")


@pytest.mark.parametrize(
    ("built", "gpu", "fits"),
    [
        ((87,), "8.7", True),
        ((86,), "8.7", False),
        ((80,), "8.6", True),
        ((90,), "8.9", False),
        ((89,), "12.0", False),
        ((86, 120), "12.0", True),
    ],
)
def test_machine_code_must_fit_the_gpu(places: Folders, built: tuple[int, ...], gpu: str, fits: bool) -> None:
    """Later minors of one major run older code; Tegra's code must be exact."""
    put(places.engines, "a-cuda-1", arch=built)
    write_selection(places.engines, SelectedEngine("a-cuda-1"))
    if fits:
        assert choose(places, None, needs_gpu=True, capabilities=(gpu,)).built_for == built
    else:
        with pytest.raises(EngineMissingError, match="built for"):
            choose(places, None, needs_gpu=True, capabilities=(gpu,))


@pytest.mark.parametrize(("built", "fits"), [((86,), True), ((35,), True), ((75,), False)])
def test_code_for_one_of_several_gpus_is_enough(places: Folders, built: tuple[int, ...], fits: bool) -> None:
    """The plan leaves the others out."""
    put(places.engines, "a-cuda-1", arch=built)
    write_selection(places.engines, SelectedEngine("a-cuda-1"))
    if fits:
        assert choose(places, None, needs_gpu=True, capabilities=("3.5", "8.6")).built_for == built
    else:
        with pytest.raises(EngineMissingError, match="this GPU is sm_35, sm_86"):
            choose(places, None, needs_gpu=True, capabilities=("3.5", "8.6"))


def test_asked_for_by_id_path_folder_or_name(places: Folders, tmp_path: Path) -> None:
    put(places.engines, "a-cpu-1")
    server = write_server(tmp_path / "mine/llama-server", era="flash-bare")
    assert choose(places, "a-cpu-1", needs_gpu=True).id == "a-cpu-1"
    assert choose(places, str(server), needs_gpu=True).era == "flash-bare"
    assert choose(places, str(server.parent), needs_gpu=False).path == str(server)
    assert choose(places, "embedded", needs_gpu=False).kind == "embedded"
    with pytest.raises(UsageError, match="neither") as caught:
        choose(places, "nonsense", needs_gpu=False)
    assert "a-cpu-1" in (caught.value.hint or "")
    with pytest.raises(EngineMissingError):
        choose(places, "embedded-xllamacpp-0.0.1", needs_gpu=False)


def test_a_spoiled_engine_is_named_and_never_started(places: Folders) -> None:
    folder = put(places.engines, "a-cpu-1")
    write_selection(places.engines, SelectedEngine("a-cpu-1"))
    (folder / "bin/llama-server").write_bytes(b"cut off")
    with pytest.raises(EngineBrokenError, match="7 bytes"):
        choose(places, None, needs_gpu=False)
    (folder / "engine.json").write_text('{"schema": 2}')
    with pytest.raises(EngineBrokenError, match="schema"):
        choose(places, None, needs_gpu=False)
    (folder / "engine.json").write_text('{"schema": 1, "files": {"bin/llama-server": {"bytes": 7}}}')
    with pytest.raises(EngineBrokenError, match="not whole"):
        choose(places, None, needs_gpu=False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"current": "../etc"}', '{"current": 3}', '{"current": ".hidden"}'])
def test_an_unreadable_selection_selects_nothing(places: Folders, text: str) -> None:
    places.engines.mkdir(parents=True)
    (places.engines / "selected.json").write_text(text)
    assert read_selection(places.engines) == SelectedEngine()


def test_ids_are_listed_oldest_first_and_leftovers_are_not_engines(places: Folders) -> None:
    put(places.engines, "b-cpu-1")
    put(places.engines, "a-cpu-1")
    (places.engines / ".new-1/bin").mkdir(parents=True)
    (places.engines / "empty").mkdir()
    assert set(ids(places.engines)) == {"a-cpu-1", "b-cpu-1"}


def test_a_new_engine_that_never_becomes_ready_gives_way(places: Folders) -> None:
    put(places.engines, "old")
    put(places.engines, "new")
    write_selection(places.engines, SelectedEngine("new", "old"))
    ready = {"engine": "old", "outcome": "ready"}
    dead = {"engine": "new", "outcome": "failed: exited"}
    assert choose(places, None, needs_gpu=False, starts=[ready, dead, dead]).id == "new"
    assert choose(places, None, needs_gpu=False, starts=[ready, dead, dead, dead]).id == "old"
    instead = fallback_now(places.engines, [ready, dead, dead, dead])
    assert instead is not None and instead.instead_of == "new"
    assert read_selection(places.engines) == SelectedEngine("new", "old"), "what was selected is not rewritten"


def test_the_embedded_engine_is_found_without_importing_it() -> None:
    code = (
        "import sys; from edge.engine.embedded_engine import find_embedded; e = find_embedded(sys.executable);"
        "assert e is not None and e.version, e; assert 'xllamacpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert find_embedded("/nonexistent/python") is None


def test_choosing_needs_the_standard_library_and_msgspec_only() -> None:
    """It runs in `up` before the child is spawned (tomli is allowed on Python 3.10)."""
    code = (
        "import sys; before = set(sys.modules); import edge.engine.choose;"
        "top = {name.split('.')[0] for name in set(sys.modules) - before};"
        "assert top <= {*sys.stdlib_module_names, 'edge', 'tomli', 'msgspec', 'typing_extensions'}, top"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
