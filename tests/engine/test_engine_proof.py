"""A CUDA engine must show CUDA, for this GPU, and where a GPU is it must see it (FC-01, FC-05, FC-10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.engine.faults import BuildError
from edge.engine.proof import prove
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
    with pytest.raises(BuildError, match="CUDA was wanted"):
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
    assert "no GPU is in sight" in proof.notes[0]


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
