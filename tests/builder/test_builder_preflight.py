"""What is said before an hour of compiling (FC-02, FC-04, FC-05, FC-08, FC-13, FC-14)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge.board.cgroup import oom_kills
from edge.builder.measure import available_memory_bytes, has_new_declarations, usable_cores
from edge.builder.preflight import BuildHost, BuildNeeds, preflight
from edge.builder.recipe import Recipe
from edge.builder.toolchain import Tool, Toolchain, Toolkit, choose_host_compiler, choose_toolkit, numbers, toolkit_row
from edge.linux.tree import Tree
from edge.resources import data_dir, load_toml

_TABLE = load_toml(data_dir("build") / "llama.cpp.toml")
_GIB = 1024**3
_RELEASED = 1_790_000_000.0

_KIT = Toolkit("/usr/local/cuda-12.6/bin/nvcc", (12, 6), (75, 87))
_TOOLS = Toolchain(
    machine="aarch64",
    cmake=Tool("/usr/bin/cmake", (3, 22, 1)),
    ninja=Tool("/usr/bin/ninja", (1, 10)),
    cc=Tool("/usr/bin/cc", (11, 4, 0)),
    cxx=(Tool("/usr/bin/c++", (11, 4, 0)),),
    ccache=Tool("/usr/bin/ccache", (4, 5)),
    toolkits=(_KIT,),
)
_MACHINE = BuildHost(
    toolchain=_TOOLS,
    build_free_bytes=20 * _GIB,
    tmp_free_bytes=20 * _GIB,
    memory_available_bytes=12 * _GIB,
    cores=8,
    now_s=_RELEASED + 1000,
    newest_source_s=_RELEASED,
)
_ORIN = Recipe("orin", "orin.cmake", "0" * 64, (), cuda=True, arch=(87,), machine="aarch64", disk_bytes=2 * _GIB)
_CPU = Recipe("cpu", "cpu.cmake", "0" * 64, (), cuda=False, disk_bytes=_GIB // 2)
_WANTED = BuildNeeds(_ORIN, (87,), (12, 6), (11, 4), (13, 0), (3, 18), 9)


def _failed(wanted: BuildNeeds = _WANTED, machine: BuildHost = _MACHINE) -> dict[str, str]:
    return {finding.name: finding.sentence for finding in preflight(wanted, machine, _TABLE).failed}


def test_a_stock_orin_passes() -> None:
    done = preflight(_WANTED, _MACHINE, _TABLE)
    assert done.failed == ()
    assert done.toolkit == _KIT
    assert done.jobs == 6, "12 GiB at 2 GiB each"


def test_every_failure_has_a_hint_and_one_sentence() -> None:
    bare = replace(_MACHINE, toolchain=Toolchain("aarch64"), build_free_bytes=0, tmp_free_bytes=0, now_s=0.0)
    failed = preflight(_WANTED, bare, _TABLE).failed
    assert {f.name for f in failed} == {"cmake", "ninja", "compiler", "toolkit", "disk", "tmpdir", "clock"}
    for finding in failed:
        assert finding.hint and "\n" not in finding.sentence


def test_fc01_no_nvcc_stops_and_never_builds_for_the_cpu() -> None:
    failed = _failed(machine=replace(_MACHINE, toolchain=replace(_TOOLS, toolkits=())))
    assert "nvcc" in failed["toolkit"]


def test_fc02_without_an_architecture_nothing_starts() -> None:
    assert "architecture" in _failed(replace(_WANTED, arch=()))


def test_fc04_cuda_10_is_refused_at_once_and_names_what_is_needed() -> None:
    old = replace(_TOOLS, toolkits=(Toolkit("/usr/local/cuda/bin/nvcc", (10, 2)),))
    failed = preflight(replace(_WANTED, board_cuda=(10, 2)), replace(_MACHINE, toolchain=old), _TABLE).failed
    assert "10.2 is too old" in failed[0].sentence and "11.4" in failed[0].sentence
    assert "-p cpu" in (failed[0].hint or "")


@pytest.mark.parametrize(
    ("installed", "board", "chosen", "verdict"),
    [
        (["12.9", "11.4"], "11.4", "11.4", "warn"),  # CUDA 11 is unproven; still the right one
        (["11.7", "12.9"], "11.4", "11.7", "warn"),
        (["12.9"], "11.4", None, "fail"),  # PTX … unsupported toolchain
        (["12.6", "12.2", "13.0"], "12.6", "12.6", "ok"),
        (["12.2", "12.9"], "12.6", "12.2", "warn"),  # the older of the major
        (["12.9", "13.0"], "12.6", "12.9", "warn"),
        (["13.0"], "12.6", None, "fail"),
        (["12.6"], "13.0", "12.6", "warn"),  # an older toolkit runs on a newer driver
        (["11.8", "12.6"], None, "12.6", "ok"),
    ],
)
def test_fc05_the_toolkit_of_this_jetpack(
    installed: list[str], board: str | None, chosen: str | None, verdict: str
) -> None:
    kits = tuple(Toolkit(f"/usr/local/cuda-{text}/bin/nvcc", numbers(text)) for text in installed)
    kit, finding = choose_toolkit(kits, numbers(board) if board else None, (11, 4), (13, 0))
    assert (kit.text if kit else None) == chosen
    assert finding.verdict == verdict
    if len(installed) > 1:
        assert all(text in finding.sentence for text in installed), "all that were found are named"


def test_fc08_an_nvcc_without_the_boards_architecture() -> None:
    machine = replace(_MACHINE, toolchain=replace(_TOOLS, toolkits=(replace(_KIT, archs=(75, 80, 90)),)))
    sentence = _failed(machine=machine)["architecture"]
    assert "sm_87" in sentence and "75, 80, 90" in sentence


def test_fc08_the_table_answers_for_an_nvcc_that_does_not() -> None:
    kit = Toolkit("/usr/local/cuda/bin/nvcc", (13, 0))
    wanted = replace(_WANTED, recipe=replace(_ORIN, arch=(72,)), arch=(72,), board_cuda=(13, 0))
    assert "sm_72" in _failed(wanted, replace(_MACHINE, toolchain=replace(_TOOLS, toolkits=(kit,))))["architecture"]


def test_the_host_compiler_suits_the_toolkit() -> None:
    new, old = Tool("/usr/bin/c++", (14, 2, 0)), Tool("/usr/bin/g++-12", (12, 3, 0))
    chosen, finding = choose_host_compiler((new, old), _KIT, 9, _TABLE)
    assert chosen == old and finding.verdict == "ok"
    chosen, finding = choose_host_compiler((new,), _KIT, 9, _TABLE)
    assert chosen is None and "9 to 13" in finding.sentence and finding.hint == "sudo apt install g++-13"


def test_unlisted_toolkits_are_taken_like_the_nearest_older_one() -> None:
    assert toolkit_row((12, 6), _TABLE)["cuda"] == "12.4"
    assert toolkit_row((14, 0), _TABLE)["cuda"] == "13.0"
    assert toolkit_row((9, 0), _TABLE)["cuda"] == "10.2"


def test_old_cmake_points_to_fetch_tools() -> None:
    """JetPack 5 brings 3.16."""
    machine = replace(_MACHINE, toolchain=replace(_TOOLS, cmake=Tool("/usr/bin/cmake", (3, 16, 3))))
    (finding,) = preflight(_WANTED, machine, _TABLE).failed
    assert "3.16.3 is too old" in finding.sentence and "--fetch-tools" in (finding.hint or "")


def test_an_orin_recipe_is_not_built_on_a_pc() -> None:
    assert "x86_64" in _failed(machine=replace(_MACHINE, toolchain=replace(_TOOLS, machine="x86_64")))["machine"]


def test_fc13_a_clock_in_the_past() -> None:
    assert "clock" in _failed(machine=replace(_MACHINE, now_s=0.0))
    assert "clock" in _failed(machine=replace(_MACHINE, newest_source_s=_MACHINE.now_s + 7200))
    assert "clock" not in _failed(machine=replace(_MACHINE, newest_source_s=_MACHINE.now_s))


def test_fc14_disk_of_build_folder_and_tmpdir() -> None:
    small = 50 * 1024**2
    assert set(_failed(machine=replace(_MACHINE, build_free_bytes=small))) == {"disk"}
    assert set(_failed(machine=replace(_MACHINE, tmp_free_bytes=small))) == {"tmpdir"}
    shared = replace(_MACHINE, build_free_bytes=2 * _GIB + small, tmp_free_bytes=2 * _GIB + small, same_disk=True)
    assert set(_failed(machine=shared)) == {"disk"}, "one disk must hold both"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 256 * _GIB), st.integers(1, 128), st.booleans())
def test_jobs_never_exceed_cores_or_memory_and_are_never_zero(memory: int, cores: int, cuda: bool) -> None:
    wanted = _WANTED if cuda else replace(_WANTED, recipe=_CPU)
    machine = replace(_MACHINE, memory_available_bytes=memory, cores=cores)
    jobs = preflight(wanted, machine, _TABLE).jobs
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * (2 * _GIB if cuda else 700 * 1024**2) <= memory
    assert preflight(replace(wanted, jobs=3), machine, _TABLE).jobs == 3


def test_the_control_group_bounds_memory_and_cores(tmp_path: Path) -> None:
    """In a container the machine's memory is not the build's: its compilers are killed at the group's limit."""
    group = tmp_path / "sys/fs/cgroup/build"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/build\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable: 15000000 kB\n")
    assert available_memory_bytes(Tree(tmp_path)) == 15000000 * 1024
    (group / "memory.max").write_text(str(2 * 1024**3))
    (group / "memory.current").write_text(str(1024**3))
    (group / "cpu.max").write_text("100000 100000")
    assert available_memory_bytes(Tree(tmp_path)) == 1024**3
    assert usable_cores(Tree(tmp_path)) == 1
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(Tree(tmp_path)) == 2


@pytest.mark.parametrize(
    ("cuda", "glibc", "patched", "verdict"),
    [
        ((12, 6), "2.36", False, "ok"),
        ((12, 6), "2.41", False, "fail"),
        ((12, 6), "2.41", True, "ok"),
        ((13, 0), "2.41", False, "ok"),
        ((13, 0), "2.42", False, "fail"),
        ((13, 3), "2.42", False, "warn"),
        ((12, 6), None, False, "ok"),
    ],
)
def test_a_glibc_that_is_newer_than_the_cuda_headers(
    cuda: tuple[int, int], glibc: str | None, patched: bool, verdict: str
) -> None:
    """ggml-org/llama.cpp#16685, #17615: the compiler test fails on cospi, sinpi and rsqrt, with every gcc."""
    kit = replace(_KIT, version=cuda)
    machine = replace(_MACHINE, toolchain=replace(_TOOLS, toolkits=(kit,)), glibc=glibc, patched=patched)
    found = preflight(replace(_WANTED, board_cuda=cuda), machine, _TABLE)
    assert next(one.verdict for one in found.findings if one.name == "glibc") == verdict


def test_whether_the_headers_are_patched_is_read_from_them(tmp_path: Path) -> None:
    header = tmp_path / "targets/x86_64-linux/include/crt/math_functions.h"
    header.parent.mkdir(parents=True)
    header.write_text("extern __DEVICE_FUNCTIONS_DECL__ __device_builtin__ double cospi(double x);")
    assert not has_new_declarations(tmp_path / "bin/nvcc")
    header.write_text("extern __device_builtin__ double cospi(double x) noexcept (true);")
    assert has_new_declarations(tmp_path / "bin/nvcc")
