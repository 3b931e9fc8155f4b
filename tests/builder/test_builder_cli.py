"""`edgellm build` and `edgellm engine` as a person types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.builder import download
from edge.builder.plan import lacks_tools
from edge.cli import main
from edge.cli.build import _build
from edge.engine.installed import SelectedEngine, read_selection, write_selection
from edge.paths import Folders
from tests.builder.installing import put
from tests.builder.test_builder_build import Bench
from tests.fakes.toolchain import programs
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


@pytest.fixture
def bench(tmp_path: Path, places: Folders) -> Bench:
    return Bench(tmp_path, places)


def index(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace pip by a program that installs a cmake and a ninja, and notes each call in the file returned."""
    wheels, called = bench.bin.parent / "wheels", bench.bin.parent / "pip-called"
    for name in ("cmake", "ninja"):
        (wheels / name / "data/bin").mkdir(parents=True)
    programs.cmake(wheels / "cmake/data/bin", "3.31.6")
    shutil.copy2(bench.bin / "ninja", wheels / "ninja/data/bin")
    target = 'while [ "$1" != --target ]; do shift; done'
    pip = programs.program(bench.bin.parent / "pip", f"echo called >> '{called}'\n{target}\ncp -r '{wheels}'/. \"$2\"")
    monkeypatch.setattr(download, "pip_command", lambda: [str(pip)])
    return called


@pytest.mark.parametrize("lack", ["cmake", "ninja", "old cmake"])
def test_fetch_tools_takes_from_pypi_what_is_missing_or_too_old(
    bench: Bench, places: Folders, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """JetPack 5 has cmake 3.16 and no ninja; a build that `edgellm up` starts must not end there."""
    called = index(bench, monkeypatch)
    if lack == "old cmake":
        programs.cmake(bench.bin, "3.10.2")
    else:
        (bench.bin / lack).unlink()
    # Without the system's folders: a cmake of this machine would be found there.
    for name in ("mkdir", "sh"):
        (bench.bin / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    environment = {**bench.request.environment, "PATH": str(bench.bin)}
    request = replace(bench.request, environment=environment, fetch_tools=True)
    _build(request, False, False)
    assert called.read_text() == "called\n"
    assert read_selection(places.engines).current == "unknown-cpu-1"
    assert not (bench.bin / "configured").exists(), "the fetched cmake configures, not the system's"
    _build(request, False, False)
    assert called.read_text() == "called\n", "fetched once"


def test_fetch_tools_takes_nothing_where_the_tools_of_the_system_suffice(
    bench: Bench, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = index(bench, monkeypatch)
    _build(replace(bench.request, fetch_tools=True), False, False)
    assert read_selection(places.engines).current == "unknown-cpu-1"
    assert not called.exists() and not bench.request.tools_dir.exists()
    assert (bench.bin / "configured").is_file()


def test_cuda_needs_a_newer_cmake_than_the_cpu(bench: Bench) -> None:
    programs.cmake(bench.bin, "3.16.3")
    programs.nvcc(bench.bin.parent / "cuda/bin", "11.4")
    environment = {**bench.request.environment, "CUDA_HOME": str(bench.bin.parent / "cuda")}
    assert not lacks_tools(replace(bench.request, environment=environment))
    assert lacks_tools(replace(bench.request, environment=environment, recipe="cuda"))
