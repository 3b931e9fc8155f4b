"""Finding compilers where they hide (FC-01, FC-02, FC-05, FC-08)."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.builder.toolchain import ask_gpu, survey
from tests.fakes.toolchain import programs


def _survey(root: Path, path: str = "", cuda: bool = True):  # type: ignore[no-untyped-def]
    return survey({"PATH": path or str(root / "none")}, root, cuda=cuda, machine="aarch64")


@pytest.mark.parametrize("folder", ["usr/local/cuda/bin", "usr/local/cuda-12.6/bin"])
def test_fc01_nvcc_is_found_where_a_services_path_does_not_reach(tmp_path: Path, folder: str) -> None:
    programs.nvcc(tmp_path / folder, "12.6")
    (kit,) = _survey(tmp_path).toolkits
    assert kit.nvcc == str(tmp_path / folder / "nvcc")
    assert kit.version == (12, 6)


def test_fc05_all_toolkits_are_listed_once(tmp_path: Path) -> None:
    programs.nvcc(tmp_path / "usr/local/cuda-11.4/bin", "11.4")
    programs.nvcc(tmp_path / "opt/bin", "12.9")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-11.4")
    kits = _survey(tmp_path, str(tmp_path / "opt/bin")).toolkits
    assert sorted(kit.text for kit in kits) == ["11.4", "12.9"]


def test_a_wrapper_on_path_gives_way_to_its_toolkit(tmp_path: Path) -> None:
    real = programs.nvcc(tmp_path / "usr/local/cuda-13.0/bin", "13.0")
    programs.program(tmp_path / "bin/nvcc", f'exec {real} "$@"')
    (kit,) = _survey(tmp_path, str(tmp_path / "bin")).toolkits
    assert kit.nvcc == str(real)


def test_fc08_nvcc_says_what_it_can_compile(tmp_path: Path) -> None:
    programs.nvcc(tmp_path / "usr/local/cuda/bin", "12.6", (50, 75, 87, 90))
    assert _survey(tmp_path).toolkits[0].archs == (50, 75, 87, 90)


def test_fc04_an_nvcc_that_does_not_know_the_question(tmp_path: Path) -> None:
    programs.nvcc(tmp_path / "usr/local/cuda/bin", "10.2", None)
    kit = _survey(tmp_path).toolkits[0]
    assert (kit.version, kit.archs) == ((10, 2), ())


def test_a_broken_nvcc_is_no_toolkit(tmp_path: Path) -> None:
    programs.program(tmp_path / "usr/local/cuda/bin/nvcc", "exit 1")
    assert _survey(tmp_path).toolkits == ()


def test_no_cuda_asked_no_nvcc_run(tmp_path: Path) -> None:
    programs.nvcc(tmp_path / "usr/local/cuda/bin", "12.6")
    assert _survey(tmp_path, cuda=False).toolkits == ()


def test_tools_and_several_compilers(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    programs.gcc(folder, "14.2.0")
    programs.gcc(folder, "12.3.0", ("g++-12",))
    programs.tool(folder, "cmake", "cmake version 3.25.1\n\nCMake suite")
    programs.tool(folder, "ninja", "1.11.1")
    found = _survey(tmp_path, str(folder))
    assert [tool.version[0] for tool in found.cxx] == [14, 12]
    assert found.cmake is not None and found.cmake.version == (3, 25, 1)
    assert found.ninja is not None and found.cc is not None and found.ccache is None


def test_fetched_tools_go_first(tmp_path: Path) -> None:
    programs.tool(tmp_path / "system", "cmake", "cmake version 3.16.3")
    programs.tool(tmp_path / "tools/bin", "cmake", "cmake version 3.31.6")
    found = survey({"PATH": str(tmp_path / "system")}, tmp_path, cuda=False, tools_dir=tmp_path / "tools")
    assert found.cmake is not None and found.cmake.text == "3.31.6"


@pytest.mark.parametrize(
    ("said", "capabilities"),
    [
        ("9.0", ("9.0",)),
        ("8.9\n8.9\n12.0", ("8.9", "12.0")),
        ("No devices were found", ()),
        ("[N/A]", ()),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ()),
        ("8.7; rm -rf /", ()),
    ],
)
def test_fc02_a_sentence_is_no_architecture(tmp_path: Path, said: str, capabilities: tuple[str, ...]) -> None:
    programs.nvidia_smi(tmp_path / "bin", said)
    assert ask_gpu({"PATH": str(tmp_path / "bin") + ":/bin:/usr/bin"}, tmp_path) == capabilities
