"""The real source, the real compilers (only in `make test-full`).

Sources, build folders and ccache stay in ~/.cache/edgellm-tests: the first run compiles for 6 to 12 minutes on two
cores, later runs for seconds. Needs gcc, cmake, ninja, ccache and pip's index; sm_87 needs nvcc 13.0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.builder.compile import build_environment, run_logged
from edge.builder.download import fetch_tools
from edge.builder.install import export_engine, import_engine
from edge.builder.plan import build_table, make_plan
from edge.builder.request import BuildOptions, request_for
from edge.builder.smoke import request as ask
from edge.builder.smoke import smoke
from edge.builder.source import fetch
from edge.builder.tiny_model import write_tiny_model
from edge.cli import main
from edge.engine.binary import PTX, architectures
from edge.engine.choose import choose
from edge.engine.installed import SelectedEngine, manifest, read_selection
from edge.errors import EngineMissingError
from edge.paths import Folders, folders
from tests.kept import kept

pytestmark = pytest.mark.full

_CUBLAS = "nvidia-cublas==13.0.2.14"


def test_the_cpu_recipe_makes_all_programs_from_the_pinned_source(built: Folders) -> None:
    current = read_selection(built.engines).current
    assert current is not None and current.startswith("0c1e57098-cpu-")
    document = manifest(built.engines, current)
    assert set(document["files"]) == {f"bin/llama-{name}" for name in ("server", "quantize", "bench", "gguf-split")}
    assert document["unknown_options"] == [], "the pinned tree knows every option of the recipe"
    assert document["source"]["pinned"] and document["source"]["sha256"]
    assert document["proof"]["smoke_tokens"] == 16
    assert len(document["flags"]) > 300
    engine = choose(built, None, needs_gpu=False)
    assert (engine.kind, engine.era, engine.commit, engine.version) == (
        "llama-server",
        "load-mode",
        "0c1e57098",
        "0.5.0-dev",
    )
    assert engine.progress_protocol and not engine.cuda
    linked = subprocess.run(["ldd", engine.path], capture_output=True, text=True, check=True).stdout
    assert "libssl" not in linked and "libllama" not in linked and "not found" not in linked


def test_the_same_build_again_does_nothing(built: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "-p", "cpu", "--state-dir", str(built.data.parent)]) == 0
    assert "is already built" in capsys.readouterr().out


def test_the_other_programs_run(built: Folders, tmp_path: Path) -> None:
    folder = Path(choose(built, None, needs_gpu=False).path).parent
    model = write_tiny_model(tmp_path / "tiny.gguf")
    done = subprocess.run(
        [folder / "llama-quantize", "--allow-requantize", model, tmp_path / "q4.gguf", "Q4_0", "1"], capture_output=True
    )
    assert done.returncode == 0 and (tmp_path / "q4.gguf").stat().st_size < model.stat().st_size
    assert subprocess.run([folder / "llama-gguf-split", "--version"], capture_output=True).returncode == 0
    if choose(built, None, needs_gpu=False).without:
        return  # llama-bench has no switch for what crashes on this machine
    done = subprocess.run(
        [folder / "llama-bench", "-m", model, "-p", "8", "-n", "4", "-r", "1", "-o", "json"], capture_output=True
    )
    assert done.returncode == 0 and json.loads(done.stdout)[0]["avg_ts"] > 0


def test_up_serves_with_it_rather_than_with_the_embedded_engine(built: Folders, tmp_path: Path) -> None:
    """Over a unix socket, chosen without a word; `engine rollback` returns to the former one."""
    model = write_tiny_model(tmp_path / "tiny.gguf")
    state = str(built.data.parent)
    command = [
        sys.executable,
        "-m",
        "edge",
        "up",
        "-p",
        "cpu",
        "-m",
        f"tiny={model}",
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        state,
    ]
    said = tmp_path / "said"
    with said.open("w") as out:
        up = subprocess.Popen([*command, "--json"], stdout=out, stderr=subprocess.STDOUT)
    try:
        wait = [sys.executable, "-m", "edge", "wait", "--timeout", "120", "--state-dir", state]
        assert subprocess.run(wait).returncode == 0, said.read_text()
        socket = built.model_socket("tiny")
        question = json.dumps({"prompt": "x", "n_predict": 4, "ignore_eos": True})
        status, body = ask(socket, "POST", "/completion", question)
        assert status == 200 and json.loads(body)["tokens_predicted"] == 4
    finally:
        up.terminate()
        up.wait(60)
    assert "0c1e57098-cpu-" in said.read_text()
    assert main(["engine", "rollback", "--state-dir", state]) == 0
    assert choose(built, None, needs_gpu=False).kind == "embedded"
    assert main(["engine", "rollback", "--state-dir", state]) == 0
    assert choose(built, None, needs_gpu=False).kind == "llama-server"


def test_export_here_import_there_serve(built: Folders, tmp_path: Path) -> None:
    current = read_selection(built.engines).current
    assert current is not None
    export_engine(built.engines, current, tmp_path / "engine.tar")
    there = folders({}, tmp_path / "there")
    assert import_engine(there.engines, tmp_path / "engine.tar") == (current, True)
    assert read_selection(there.engines) == SelectedEngine(current)
    assert smoke(choose(there, None, needs_gpu=False), gpu=False).tokens == 16
    with pytest.raises(EngineMissingError):
        choose(there, None, needs_gpu=True, profile="cuda")


def _statistics(test_cache: Path) -> dict[str, int]:
    done = subprocess.run(
        ["ccache", "--print-stats"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CCACHE_DIR": str(test_cache / "ccache")},
    )
    return {name: int(value) for name, value in (line.split("\t") for line in done.stdout.splitlines())}


def test_a_changed_option_reuses_what_was_compiled(built: Folders, test_cache: Path, tmp_path: Path) -> None:
    """Another build folder, the same objects: at least five of six come from ccache."""
    recipe = tmp_path / "changed.cmake"
    shutil.copy(Path("build/common.cmake"), tmp_path)
    recipe.write_text(Path("build/cpu.cmake").read_text() + 'set(LLAMA_TOOLS_INSTALL OFF CACHE BOOL "a change")\n')
    request = replace(request_for(BuildOptions(recipe=str(recipe)), built, os.environ), force=True)
    plan = make_plan(request)
    shutil.rmtree(plan.commands.build_dir, ignore_errors=True)
    environment = build_environment(os.environ, [])
    log = tmp_path / "log"
    assert run_logged(plan.commands.configure, environment, log, lambda _: None) == 0
    before = _statistics(test_cache)
    assert run_logged([*plan.commands.build[:5], "llama-quantize"], environment, log, lambda _: None) == 0, (
        log.read_text()[-2000:]
    )
    after = _statistics(test_cache)
    hits = sum(after[name] - before[name] for name in ("direct_cache_hit", "preprocessed_cache_hit"))
    misses = after["cache_miss"] - before["cache_miss"]
    assert hits >= 5 * misses and hits > 50, (hits, misses)
    shutil.rmtree(plan.commands.build_dir)


def test_cmake_and_ninja_from_their_wheels(tmp_path: Path) -> None:
    fetch_tools(tmp_path / "tools", build_table()["tools"]["wheels"], lambda _: None)
    for name, expected in (("cmake", "3.31.6"), ("ninja", "1.11.1")):
        done = subprocess.run(
            [tmp_path / "tools/bin" / name, "--version"], capture_output=True, text=True, env={}, check=True
        )
        assert expected in done.stdout


@pytest.fixture(scope="session")
def cuda_root(test_cache: Path) -> Path:
    """The machine's nvcc 13.0 and cuBLAS from its wheel, as one toolkit (its own folder has no cuBLAS here)."""
    nvcc = next(
        (Path(p) for p in ("/usr/local/cuda-13.0/bin/nvcc", "/usr/local/cuda/bin/nvcc") if Path(p).exists()), None
    )
    if nvcc is None:
        pytest.skip("no nvcc")
    root = test_cache / "cuda"

    def make(_: Path) -> None:
        shutil.copytree(nvcc.resolve().parent.parent, root, symlinks=True)
        wheels = test_cache / "wheels"
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), _CUBLAS], check=True
        )
        with zipfile.ZipFile(next(wheels.glob("nvidia_cublas-*.whl"))) as wheel:
            for member in wheel.namelist():
                place = re.search(r"/(include|lib)/([^/]+)$", member)
                if place:
                    target = root / place[1] / place[2]
                    target.parent.mkdir(exist_ok=True)
                    with wheel.open(member) as source, target.open("wb") as out:
                        shutil.copyfileobj(source, out)
        for name in ("cublas", "cublasLt"):
            (root / f"lib/lib{name}.so").symlink_to(f"lib{name}.so.13")

    return kept(root, make, stamp="ready")


CU_FILES = ("scale.cu", "template-instances/mmq-instance-q5_k.cu", "template-instances/fattn-vec-instance-q8_0-q8_0.cu")


def test_three_cuda_files_are_compiled_for_orin(built: Folders, cuda_root: Path, ccache: None, tmp_path: Path) -> None:
    """The recipe `orin` less what is the aarch64 machine's: configured whole, sm_87 in each object and no PTX."""
    recipe = tmp_path / "orin-here.cmake"
    shutil.copy(Path("build/common.cmake"), tmp_path)
    recipe.write_text(re.sub(r"set\(GGML_CPU_ARM_ARCH .*\n", "", Path("build/orin.cmake").read_text()))
    environment = {**os.environ, "PATH": f"{cuda_root}/bin:/usr/local/bin:/usr/bin:/bin"}
    request = request_for(BuildOptions(recipe=str(recipe)), built, environment)
    plan = make_plan(request)
    assert plan.preflight.failed == () and plan.arch == (87,)
    assert plan.preflight.toolkit is not None and plan.preflight.toolkit.nvcc == str(cuda_root / "bin/nvcc")
    fetch(request.source, plan.pin, request.source_dir, plan.drop, lambda _: None)
    log = tmp_path / "log"
    whole = build_environment(environment, [])
    assert run_logged(plan.commands.configure, whole, log, lambda _: None) == 0, log.read_text()[-3000:]
    objects = [f"ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/{file}.o" for file in CU_FILES]
    assert run_logged([*plan.commands.build[:5], *objects], whole, log, lambda _: None) == 0, log.read_text()[-3000:]
    for name in objects:
        data = (Path(plan.commands.build_dir) / name).read_bytes()
        assert (architectures(data), architectures(data, PTX)) == ({87}, set()), name


def test_the_bindings_share_the_model_store(built: Folders, ccache: None, tmp_path: Path) -> None:
    """`edgellm build --bindings`, then the snippet of build/README.md as it stands there."""
    state = built.data.parent
    assert main(["build", "-p", "cpu", "--bindings", "--state-dir", str(state)]) == 0
    wheel = max((built.cache / "wheels").rglob("llama_cpp_python-*.whl"), key=lambda path: path.stat().st_mtime)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([venv / "bin/pip", "install", "-q", str(wheel)], check=True)
    text = Path("build/README.md").read_text()
    snippet = text.split("```python\n# with the bindings\n", 1)[1].split("```", 1)[0]
    built.models.mkdir(parents=True, exist_ok=True)
    write_tiny_model(built.models / "tiny.gguf")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "EDGELLM_STATE_DIR": str(state),
        "MODEL": "tiny",
    }
    done = subprocess.run([venv / "bin/python", "-c", snippet], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]
