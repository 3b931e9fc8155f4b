"""The exact command lines (FC-01, FC-02, FC-05, FC-07, FC-11), reviewed like code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.builder.commands import BuildInputs, commands, fingerprint
from edge.builder.plan import make_plan
from edge.builder.recipe import make_recipe
from edge.builder.request import BuildOptions, parse_arch, request_for
from edge.builder.toolchain import Tool, Toolkit
from edge.errors import UnavailableError, UsageError
from edge.paths import Folders
from tests.fakes.toolchain import programs
from tests.trees.trees import copy

_RECIPE = make_recipe("cuda", "/b/cuda.cmake", ['set(GGML_CUDA ON CACHE BOOL "the point")'], {})
_INPUTS = BuildInputs(
    recipe=_RECIPE,
    tree="/src/0c1e57098",
    commit="0c1e57098bba43ac29e6e3b677cdceebdd22334f",
    build_number=0,
    arch=(90,),
    machine="x86_64",
    isa=(),
    cmake=Tool("/usr/bin/cmake", (3, 25, 1)),
    ninja=Tool("/usr/bin/ninja", (1, 11)),
    cc=Tool("/usr/bin/cc", (12, 2)),
    cxx=Tool("/usr/bin/c++", (12, 2)),
    toolkit=Toolkit("/usr/local/cuda-13.0/bin/nvcc", (13, 0)),
    host_compiler=Tool("/usr/bin/g++-12", (12, 3)),
    targets=("llama-server", "llama-bench"),
    jobs=4,
)


def test_the_whole_line() -> None:
    made = commands(_INPUTS, "/cache/build")
    assert " ".join(made.configure) == (
        f"/usr/bin/cmake -C /b/cuda.cmake -S /src/0c1e57098 -B /cache/build/{made.fingerprint} -G Ninja"
        " -DLLAMA_BUILD_COMMIT=0c1e57098 -DLLAMA_BUILD_NUMBER=0"
        " -DCMAKE_C_COMPILER=/usr/bin/cc -DCMAKE_CXX_COMPILER=/usr/bin/c++ -DCMAKE_MAKE_PROGRAM=/usr/bin/ninja"
        " -DCMAKE_CUDA_COMPILER=/usr/local/cuda-13.0/bin/nvcc -DCMAKE_CUDA_ARCHITECTURES=90-real"
        " -DCMAKE_BUILD_RPATH=/usr/local/cuda-13.0/lib64;/usr/local/cuda-13.0/lib"
        " -DCMAKE_CUDA_HOST_COMPILER=/usr/bin/g++-12"
    )
    assert made.build == (
        "/usr/bin/ninja", "-C", f"/cache/build/{made.fingerprint}", "-j", "4", "llama-server", "llama-bench",
    )  # fmt: skip


def test_rpc_is_two_options_more_and_another_build() -> None:
    made, plain = commands(replace(_INPUTS, rpc=True), "/c"), commands(_INPUTS, "/c")
    more = [word for word in made.configure if word not in plain.configure and word.startswith("-D")]
    assert more == ["-DGGML_RPC=ON", "-DGGML_RPC_RDMA=OFF"]
    assert made.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"commit": "1" * 40},
        {"arch": (89,)},
        {"toolkit": Toolkit("/usr/local/cuda-12.6/bin/nvcc", (12, 6))},
        {"cxx": Tool("/usr/bin/c++", (13, 1))},
        {"cmake": Tool("/usr/bin/cmake", (3, 31))},
        {"recipe": make_recipe("cuda", "/b/cuda.cmake", ['set(GGML_CUDA ON CACHE BOOL "other why")'], {})},
        {"machine": "aarch64"},
    ],
)
def test_what_changes_the_build_gets_another_folder(change: dict[str, object]) -> None:
    """An existing CMakeCache would win over a changed script."""
    assert fingerprint(replace(_INPUTS, **change)) != fingerprint(_INPUTS)  # type: ignore[arg-type]


def test_jobs_and_places_do_not() -> None:
    assert fingerprint(replace(_INPUTS, jobs=1, tree="/elsewhere")) == fingerprint(_INPUTS)


def test_fc07_aarch64_states_its_cpu() -> None:
    arm = replace(_INPUTS, machine="aarch64", isa=("asimddp", "fphp", "asimdhp"))
    line = commands(arm, "/b").configure
    assert "-DGGML_NATIVE=OFF" in line and "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16" in line
    assert "-DGGML_CPU_ARM_ARCH=armv8-a" in commands(replace(arm, baseline=True), "/b").configure
    assert not any("ARM_ARCH" in word for word in commands(_INPUTS, "/b").configure)


def _orin(root: Path) -> None:
    """A board with the tools of JetPack 6: two toolkits, nvcc on no PATH, a default gcc that nvcc takes."""
    programs.nvcc(root / "usr/local/cuda-12.6/bin", "12.6", (50, 87, 90))
    programs.nvcc(root / "usr/local/cuda-13.0/bin", "13.0", (75, 87, 110))
    programs.cmake(root / "tools", "3.22.1")
    programs.gcc(root / "tools", "11.4.0")
    programs.tool(root / "tools", "ninja", "1.10.1")


def test_a_real_boards_files_lead_to_its_own_build(tmp_path: Path, places: Folders) -> None:
    """Board, JetPack and CUDA come from the tree of an Orin Nano (L4T 36.4); only the clock is this machine's."""
    root = copy("orin-nano-8", tmp_path / "root")
    _orin(root)
    environment = {"PATH": str(root / "tools"), "TMPDIR": str(tmp_path)}
    request = request_for(BuildOptions(root=str(root)), places, environment)
    plan = make_plan(request)
    assert plan.recipe.name == "orin"
    assert plan.arch == (87,)
    line = plan.commands.configure
    assert f"-DCMAKE_CUDA_COMPILER={root}/usr/local/cuda-12.6/bin/nvcc" in line  # FC-01, FC-05
    verdicts = {finding.name: finding.verdict for finding in plan.preflight.findings}
    assert verdicts["toolkit"] == verdicts["architecture"] == verdicts["compiler"] == "ok"
    assert plan.recipe.option("GGML_CUDA_NO_VMM") == "ON"  # FC-11
    assert {name for name, verdict in verdicts.items() if verdict == "fail"} <= {"machine"}, "only that this is a PC"


@pytest.mark.parametrize("tree", ["nano", "tx2"])
def test_fc04_boards_of_jetpack_4_are_refused_in_the_first_second(tmp_path: Path, places: Folders, tree: str) -> None:
    root = copy(tree, tmp_path / "root")
    programs.nvcc(root / "usr/local/cuda/bin", "10.2", None)
    request = request_for(BuildOptions(recipe="cuda", root=str(root)), places, {"PATH": str(tmp_path)})
    with pytest.raises(UnavailableError, match=r"11\.4") as caught:
        make_plan(request)
    assert "-p cpu" in (caught.value.hint or "")


def test_xavier_is_refused_unless_forced(tmp_path: Path, places: Folders) -> None:
    request = request_for(BuildOptions(board="agx-xavier-32"), places, {"PATH": str(tmp_path)})
    with pytest.raises(UnavailableError, match="unproven"):
        make_plan(request)
    assert make_plan(replace(request, force=True)).arch == (72,)


def test_an_old_card_beside_a_new_one_does_not_change_the_build_for_the_new_one(
    tmp_path: Path, places: Folders
) -> None:
    """CUDA 12.6 compiles for sm_50 and later: a GT 710 beside an RTX 4090 is left out, alone it fails the preflight."""
    root = copy("rtx-4090", tmp_path / "root")
    programs.nvcc(root / "usr/local/cuda-12.6/bin", "12.6", None)
    old = "1, GPU-0710, NVIDIA GeForce GT 710, 00000000:09:00.0, 2048, 1500, 3.5, [N/A], 570.133.07\n"
    recorded = root / "nvidia-smi.csv"
    alone = recorded.read_text()
    recorded.write_text(alone.rstrip() + "\n" + old)
    environment = {"PATH": str(root / "tools"), "TMPDIR": str(tmp_path)}
    both = make_plan(request_for(BuildOptions(root=str(root)), places, environment))
    assert (both.recipe.name, both.arch) == ("cuda", (89,))
    recorded.write_text(alone.splitlines()[0] + "\n" + old)
    only_old = make_plan(request_for(BuildOptions(root=str(root)), places, environment))
    assert "sm_35" in {finding.name: finding.sentence for finding in only_old.preflight.failed}["architecture"]


def test_a_stand_in_board_shows_its_commands_on_any_machine(tmp_path: Path, places: Folders) -> None:
    request = request_for(BuildOptions(profile="orin", board="agx-orin-64"), places, {"PATH": str(tmp_path)})
    plan = make_plan(request)
    assert plan.preflight.failed == ()
    assert "-DCMAKE_CUDA_COMPILER=/usr/local/cuda/bin/nvcc" in plan.commands.configure
    assert plan.inputs.machine == "aarch64"


def test_the_users_own_recipe_comes_first(tmp_path: Path, places: Folders) -> None:
    own = places.config / "build/cpu.cmake"
    own.parent.mkdir(parents=True)
    own.write_text('set(GGML_CUDA OFF CACHE BOOL "mine")\nset(GGML_LTO ON CACHE BOOL "to try it")\n')
    plan = make_plan(request_for(BuildOptions(recipe="cpu"), places, {"PATH": "/usr/bin:/bin"}))
    assert plan.recipe.option("GGML_LTO") == "ON" and plan.recipe.script == str(own)
    file = tmp_path / "x.cmake"
    file.write_text('set(GGML_CUDA OFF CACHE BOOL "mine")\n')
    assert make_plan(request_for(BuildOptions(recipe=str(file)), places, {"PATH": "/usr/bin:/bin"})).recipe.name == "x"
    with pytest.raises(UsageError, match="no recipe"):
        make_plan(request_for(BuildOptions(recipe="nonsense"), places, {"PATH": "/usr/bin:/bin"}))


def test_fc02_architectures_are_numbers() -> None:
    assert parse_arch("87") == parse_arch("sm_87") == parse_arch("8.7") == (87,)
    assert parse_arch("12.0,89") == (89, 120)
    for text in ("native", "No devices were found", "87;x", "", "87-real"):
        with pytest.raises(UsageError):
            parse_arch(text)


def test_fc02_a_gpu_that_answers_with_a_sentence(tmp_path: Path, places: Folders) -> None:
    root = tmp_path / "root"
    programs.nvidia_smi(root / "tools", "No devices were found")
    programs.nvcc(root / "usr/local/cuda/bin", "13.0", (90,))
    request = request_for(BuildOptions(recipe="cuda", root=str(root)), places, {"PATH": f"{root}/tools:/usr/bin:/bin"})
    plan = make_plan(request)
    assert plan.arch == ()
    assert "architecture" in {finding.name for finding in plan.preflight.failed}
    assert not any("devices" in word for word in plan.commands.configure)


def test_hidden_gpus_give_a_build_no_architecture(
    tmp_path: Path, places: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi ignores CUDA_VISIBLE_DEVICES, and names the card."""
    root = copy("rtx-4090", tmp_path / "root")
    programs.nvidia_smi(root / "tools", "8.9")
    programs.nvcc(root / "usr/local/cuda-12.6/bin", "12.6", None)
    environment = {"PATH": f"{root}/tools:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    seen = {}
    for value in ("0", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        seen[value] = make_plan(request_for(BuildOptions(recipe="cuda", root=str(root)), places, environment))
    assert seen["0"].arch == (89,)
    assert seen["-1"].arch == ()
    assert "architecture" in {finding.name for finding in seen["-1"].preflight.failed}
    by_hand = request_for(BuildOptions(recipe="cuda", root=str(root), arch="89"), places, environment)
    assert make_plan(by_hand).arch == (89,)


def test_the_json_plan_is_json(places: Folders) -> None:
    from edge.builder.plan import plan_document

    request = request_for(BuildOptions(profile="orin", board="orin-nano-8"), places, {"PATH": "/usr/bin"})
    document = json.loads(json.dumps(plan_document(request, make_plan(request))))
    assert document["schema"] == 1 and document["recipe"]["name"] == "orin"
    assert {"name", "value", "because"} == set(document["options"][0])
