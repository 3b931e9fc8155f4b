"""A CUDA engine must show CUDA, for this GPU, and where a GPU is it must see it (FC-01, FC-05, FC-10)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from edge.builder.install import commit, describe, export_engine, import_engine, staging
from edge.builder.proof import accelerations, prove
from edge.builder.smoke import crash_place, locate_crash
from edge.engine.engine import Engine, Flag
from edge.engine.installed import load
from edge.errors import BuildError
from tests.fakes.toolchain.elf import MACHINE_CODE, PTX, elf, fatbin
from tests.fakes.toolchain.server import write_server

_DEVICE = ["CUDA0: Orin (7485 MiB, 6152 MiB free)"]


@pytest.fixture
def no_gpu(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def with_gpu(no_gpu: Path) -> Path:
    (no_gpu / "dev").mkdir()
    (no_gpu / "dev/nvhost-ctrl-gpu").touch()
    return no_gpu


def _server(folder: Path, entries: list[tuple[int, int]] | None, **behaviour: object) -> Path:
    """A server whose CUDA half lies in a library beside it."""
    server = write_server(folder / "bin/llama-server", **behaviour)
    if entries is not None:
        library = elf("aarch64", fatbin(entries), b"ggml_cuda_init")
        (server.parent / "libggml-cuda.so").write_bytes(library)
    return server


def test_fc01_cuda_wanted_and_not_there(tmp_path: Path, no_gpu: Path) -> None:
    with pytest.raises(BuildError, match="CUDA was requested"):
        prove(_server(tmp_path, None), cuda=True, arch=(87,), root=no_gpu)


@pytest.mark.parametrize("entries", [[], [(PTX, 87)], [(MACHINE_CODE, 80)]])
def test_machine_code_of_the_wanted_architecture_must_be_there(
    tmp_path: Path, no_gpu: Path, entries: list[tuple[int, int]]
) -> None:
    """PTX is no proof: the driver would compile it at the first start, or refuse to."""
    with pytest.raises(BuildError, match="no machine code for sm_87"):
        prove(_server(tmp_path, entries), cuda=True, arch=(87,), root=no_gpu)


def test_without_a_gpu_in_sight_the_file_is_the_proof_and_says_so(tmp_path: Path, no_gpu: Path) -> None:
    proof = prove(_server(tmp_path, [(MACHINE_CODE, 87)]), cuda=True, arch=(87,), root=no_gpu)
    assert (proof.gpu, proof.engine.built_for, proof.traits.no_vmm) == (False, (87,), True)
    assert "no GPU is visible" in proof.notes[0]


def test_fc05_a_gpu_is_here_and_the_engine_does_not_see_it(tmp_path: Path, with_gpu: Path) -> None:
    why = "ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient for CUDA runtime version\n"
    server = _server(tmp_path, [(MACHINE_CODE, 87)], devices_stderr=why)
    with pytest.raises(BuildError, match=r"does not see it: .*insufficient"):
        prove(server, cuda=True, arch=(87,), root=with_gpu)


def test_on_a_gpu_every_layer_must_be_on_it(tmp_path: Path, with_gpu: Path) -> None:
    good = _server(tmp_path / "a", [(MACHINE_CODE, 87)], devices=_DEVICE)
    proof = prove(good, cuda=True, arch=(87,), root=with_gpu)
    assert (proof.gpu, proof.smoke.offloaded) == (True, (3, 3))
    partly = _server(
        tmp_path / "b", [(MACHINE_CODE, 87)], devices=_DEVICE, log="load_tensors: offloaded 1/3 layers to GPU"
    )
    with pytest.raises(BuildError, match="layers on the GPU"):
        prove(partly, cuda=True, arch=(87,), root=with_gpu)


def test_fc10_libraries_that_are_only_found_in_the_build_folder(tmp_path: Path, no_gpu: Path) -> None:
    """The proof runs from / with nothing in the environment; LD_LIBRARY_PATH is not offered."""
    with pytest.raises(BuildError, match=r"exit code 127.*libllama\.so"):
        prove(_server(tmp_path, None, needs_library=True), cuda=False, arch=(), root=no_gpu)


def test_a_cpu_engine(tmp_path: Path, no_gpu: Path) -> None:
    proof = prove(_server(tmp_path, None), cuda=False, arch=(), root=no_gpu)
    assert (proof.gpu, proof.smoke.tokens, proof.notes) == (None, 16, ())
    assert proof.at.endswith("+00:00")


@pytest.mark.parametrize("crash", [signal.SIGSEGV, signal.SIGILL])
def test_a_crash_in_the_first_graph_is_proved_without_the_acceleration_that_crashes(
    tmp_path: Path, no_gpu: Path, crash: signal.Signals
) -> None:
    """AMX in a virtual machine: the build crashes at ldtilecfg and serves with --no-repack. SIGILL: another CPU."""
    said: list[str] = []
    server = _server(tmp_path, None, crashes_without="--no-repack", crash=crash, trace=str(tmp_path / "trace"))
    proof = prove(server, cuda=False, arch=(), root=no_gpu, report=said.append)
    assert [off.args for off in proof.engine.without] == [("--no-repack",)]
    assert proof.smoke.tokens == 16
    assert crash.name in said[0] and "prompts are slower on the CPU" in proof.notes[0]


def test_two_accelerations_that_crash_are_switched_off_together(tmp_path: Path, no_gpu: Path) -> None:
    server = _server(tmp_path, None, crashes_without="--no-repack --flash-attn off")
    proof = prove(server, cuda=False, arch=(), root=no_gpu)
    assert [off.id for off in proof.engine.without] == ["repacked weights", "flash attention"]


def test_a_crash_that_no_switch_helps_offers_the_build_for_any_cpu(tmp_path: Path, no_gpu: Path) -> None:
    with pytest.raises(BuildError, match=r"SIGSEGV.*switched off in vain: repacked weights, flash") as error:
        prove(_server(tmp_path, None, crashes_without="--nothing-helps"), cuda=False, arch=(), root=no_gpu)
    assert "edgellm build --no-native" in str(error.value.hint)


def test_a_refusal_is_no_crash_and_is_not_tried_again(tmp_path: Path, no_gpu: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(BuildError, match="no such file"):
        prove(_server(tmp_path, None, dies="no such file", trace=str(trace)), cuda=False, arch=(), root=no_gpu)
    assert trace.read_text().count("--model") == 1


def test_what_was_switched_off_stays_with_the_engine_and_is_found_anew_where_it_is_imported(
    tmp_path: Path, no_gpu: Path
) -> None:
    """Another machine may run what this one could not, so an import proves from the start."""
    engines = tmp_path / "engines"
    with staging(engines) as folder:
        write_server(folder / "bin/llama-server", crashes_without="--no-repack")
        proof = prove(folder / "bin/llama-server", cuda=False, arch=(), root=no_gpu)
        made = {"source": {"commit": "0c1e57098"}, "recipe": {"name": "cpu"}}
        commit(engines, folder, describe(folder, "0c1e57098-cpu-1", proof, made, None))
    assert load(engines, "0c1e57098-cpu-1").without == accelerations()[:1]
    export_engine(engines, "0c1e57098-cpu-1", tmp_path / "engine.tar")
    there, _ = import_engine(tmp_path / "there", tmp_path / "engine.tar", root=no_gpu)
    assert load(tmp_path / "there", there).without == accelerations()[:1]


def test_gdb_names_the_instruction_and_the_function_of_a_crash(tmp_path: Path) -> None:
    gcc = shutil.which("gcc")
    if gcc is None or shutil.which("gdb") is None or os.uname().machine != "x86_64":
        pytest.skip("needs gcc and gdb")
    source = tmp_path / "crash.c"
    source.write_text(
        '__attribute__((noinline)) void amx_mul_mat(void) { __asm__ volatile("ud2"); }\n'
        "int main(void) { amx_mul_mat(); return 0; }\n"
    )
    subprocess.run([gcc, "-O1", "-o", tmp_path / "server", source], check=True)
    flags = {name: Flag(name, 1) for name in ("--model", "--host")}
    engine = Engine("e", "llama-server", str(tmp_path / "server"), flags=flags)
    assert locate_crash(engine, gpu=False) == "ud2 in amx_mul_mat"


def test_a_crash_without_symbols_still_has_its_instruction() -> None:
    assert crash_place("=> 0x7f12:\tldtilecfg -0x80(%rsp)\n#0  0x00007f12 in ?? ()") == "ldtilecfg -0x80(%rsp) in ??"
    assert crash_place("[Inferior 1 exited normally]") is None
