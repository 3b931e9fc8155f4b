"""`edgellm build` and `edgellm engine` as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge.cli import main
from edge.engine.installed import SelectedEngine, read_selection, write_selection
from edge.paths import Folders
from tests.builder.installing import put
from tests.fakes.toolchain.server import write_server


@pytest.fixture
def state(tmp_path: Path) -> list[str]:
    return ["--state-dir", str(tmp_path / "state")]


def test_dry_run_prints_commands_and_reasons_for_a_board_that_is_not_here(
    state: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "-p", "orin", "--board", "agx-orin-64", "--dry-run", *state]) == 0
    out = capsys.readouterr().out
    assert "cmake -C" in out and "orin.cmake" in out and "ninja -C" in out
    for option in ("GGML_CUDA_NO_VMM", "CMAKE_CUDA_ARCHITECTURES", "87-real", "GGML_CPU_ARM_ARCH"):
        assert option in out
    assert "FC-11" in out, "each option with its reason"


def test_dry_run_as_json(state: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--board", "orin-nano-8", "--dry-run", "--json", *state]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["board"]["stand_in"] is True
    assert document["commands"][0][0].endswith("cmake")


def test_a_board_that_is_not_here_is_not_built_for(state: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--board", "agx-orin-64", *state]) == 64
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--board", "nonsense", "--dry-run"], 64),
        (["--recipe", "nonsense", "--dry-run"], 64),
        (["--source", "nonsense", "--dry-run"], 64),
        (["-p", "nonsense", "--dry-run"], 78),
        (["--board", "agx-xavier-32", "--dry-run"], 69),
    ],
)
def test_words_that_mean_nothing(
    state: list[str], arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", *arguments, *state]) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "Traceback" not in err


def test_list_show_use_rollback_remove(places: Folders, state: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for engine_id in ("a-cpu-1", "b-cuda-1"):
        put(places.engines, engine_id, arch=(87,) if "cuda" in engine_id else ())
    write_selection(places.engines, SelectedEngine("a-cpu-1"))
    assert main(["engine", "list", *state]) == 0
    out = capsys.readouterr().out
    assert "sm_87" in out and "edgellm[embedded]" in " ".join(out.split())
    assert main(["engine", "use", "b-cuda-1", *state]) == 0
    assert main(["engine", "list", "--json", *state]) == 0
    out = capsys.readouterr().out
    document = json.loads(out[out.index("{") :])
    assert (document["current"], document["previous"]) == ("b-cuda-1", "a-cpu-1")
    assert main(["engine", "rollback", *state]) == 0
    assert read_selection(places.engines) == SelectedEngine("a-cpu-1", "b-cuda-1")
    assert main(["engine", "show", *state]) == 0
    assert main(["engine", "show", "b-cuda-1", "--json", *state]) == 0
    assert main(["engine", "remove", "a-cpu-1", *state]) == 64
    assert main(["engine", "remove", "b-cuda-1", "--json", *state]) == 0
    assert read_selection(places.engines) == SelectedEngine("a-cpu-1")


def test_show_a_binary_of_somebody_else(tmp_path: Path, state: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    server = write_server(tmp_path / "theirs/llama-server", era="flash-bare")
    assert main(["engine", "show", str(server), "--json", *state]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["era"] == "flash-bare" and document["path"] == str(server)
    assert document["flags"]["-fa"]["arity"] == 0
    assert main(["engine", "show", str(server.parent), *state]) == 0
    assert main(["engine", "show", "absent", *state]) == 69


def test_export_and_import(
    places: Folders, tmp_path: Path, state: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "export", str(tmp_path / "e.tar"), *state]) == 69
    put(places.engines, "a-cpu-1")
    write_selection(places.engines, SelectedEngine("a-cpu-1"))
    assert main(["engine", "export", str(tmp_path / "e.tar"), *state]) == 0
    assert main(["engine", "import", str(tmp_path / "e.tar"), "--json", "--state-dir", str(tmp_path / "other")]) == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :]) == {"schema": 1, "engine": "a-cpu-1", "new": True}
    (tmp_path / "e.tar").write_bytes(b"spoiled")
    assert main(["engine", "import", str(tmp_path / "e.tar"), *state]) == 65


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("list", "show", "use", "rollback", "remove", "export", "import"):
        assert main(["engine", verb, "--help"]) == 0
        assert "Example" in capsys.readouterr().out
    assert main(["build", "--help"]) == 0
    assert "Examples" in capsys.readouterr().out


def test_what_an_engine_runs_without_is_listed(places: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    """AMX in a virtual machine: what was lost at the proof is seen where engines are looked at."""
    lost = "prompts are slower on the CPU"
    off = {"id": "repacked weights", "args": ["--no-repack"], "environment": {}, "lost": lost}
    put(places.engines, "amx-cpu-1", without=[off])
    state = ["--state-dir", str(places.data.parent)]
    assert main(["engine", "list", "--json", *state]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["without"] == ["repacked weights"]
    assert main(["engine", "show", "amx-cpu-1", *state]) == 0
    assert lost in " ".join(capsys.readouterr().out.split())
