"""Recipes: what they set, why, and for whom (FC-02, FC-07, FC-10, FC-11)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.builder.recipe import (
    arm_architecture,
    declared_options,
    dropped,
    hopeless,
    includes,
    make_recipe,
    parse_script,
    recipe_name,
    unknown_options,
)
from edge.errors import UsageError
from edge.resources import data_dir, load_toml

_BUILD = data_dir("build")
_TABLE = load_toml(_BUILD / "llama.cpp.toml")
_NAMES = list(_TABLE["recipes"])


def _recipe(name: str):  # type: ignore[no-untyped-def]  # the tests read it as it is
    text = (_BUILD / f"{name}.cmake").read_text()
    texts = [*((_BUILD / other).read_text() for other in includes(text)), text]
    return make_recipe(name, f"{name}.cmake", texts, _TABLE["recipes"][name])


@pytest.mark.parametrize("name", _NAMES)
def test_every_line_of_a_recipe_is_understood_and_has_its_why(name: str) -> None:
    for file in (f"{name}.cmake", "common.cmake"):
        text = (_BUILD / file).read_text()
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("#", "include("))]
        assert len(parse_script(text)) == len(lines), file
    for option in _recipe(name).options:
        assert len(option.why) >= 7, option
        assert option.type in ("BOOL", "STRING", "FILEPATH")


@pytest.mark.parametrize("name", ["orin", "thor", "xavier"])
def test_fc11_tegra_is_built_without_vmm(name: str) -> None:
    assert _recipe(name).option("GGML_CUDA_NO_VMM") == "ON"


@pytest.mark.parametrize("name", ["orin", "thor", "xavier"])
def test_fc07_boards_state_their_cpu_by_hand(name: str) -> None:
    recipe = _recipe(name)
    assert recipe.option("GGML_NATIVE") == "OFF"
    assert (recipe.option("GGML_CPU_ARM_ARCH") or "").startswith("armv8.2-a")
    assert recipe.machine == "aarch64"


@pytest.mark.parametrize("name", ["orin", "thor", "xavier"])
def test_one_architecture_only_and_as_a_number(name: str) -> None:
    value = _recipe(name).option("CMAKE_CUDA_ARCHITECTURES") or ""
    assert re.fullmatch(r"\d+-real", value)
    assert _recipe(name).arch == (int(value.removesuffix("-real")),)


@pytest.mark.parametrize("name", _NAMES)
def test_fc10_one_file_and_nothing_from_the_net(name: str) -> None:
    recipe = _recipe(name)
    assert recipe.option("BUILD_SHARED_LIBS") == "OFF"
    assert {recipe.option(o) for o in ("LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")} == {"OFF"}


def test_only_xavier_is_refused() -> None:
    assert [name for name in _NAMES if _recipe(name).refused] == ["xavier"]


@pytest.mark.parametrize(
    ("capability", "gpu", "name"),
    [
        ("8.7", True, "orin"),
        ("11.0", True, "thor"),
        ("7.2", True, "xavier"),
        ("9.0", True, "cuda"),
        (None, False, "cpu"),
    ],
)
def test_the_board_chooses(capability: str | None, gpu: bool, name: str) -> None:
    assert recipe_name(_TABLE, capability, gpu) == name


def test_fc04_old_gpus_are_hopeless_and_get_a_way_out() -> None:
    for capability in ("5.3", "6.2"):
        found = hopeless(_TABLE, capability)
        assert found is not None
        assert "11.4" in found[0] and "-p cpu" in found[1]
    assert hopeless(_TABLE, "8.7") is None


def test_a_name_set_twice_is_refused_because_cmake_would_keep_the_first() -> None:
    with pytest.raises(UsageError, match="twice"):
        make_recipe("mine", "mine.cmake", ['set(A ON CACHE BOOL "why it is")', 'set(A OFF CACHE BOOL "why not")'], {})


def test_options_that_a_tree_does_not_know_are_found() -> None:
    tree = [
        'option(GGML_CUDA "ggml: use CUDA" OFF)\n# option(GGML_OLD "gone" OFF)\n',
        'set(GGML_CPU_ARM_ARCH   "" CACHE STRING "arch")\nset(GGML_CUDA_FA_QUANTS "a;b" CACHE STRING\n "quants")\n',
        "if (NOT DEFINED LLAMA_BUILD_COMMIT)\n",
    ]
    declared = declared_options(tree)
    assert {"GGML_CUDA", "GGML_CPU_ARM_ARCH", "GGML_CUDA_FA_QUANTS", "LLAMA_BUILD_COMMIT"} <= declared
    script = 'set(GGML_CUDA ON CACHE BOOL "x")\nset(GGML_OLD ON CACHE BOOL "x")\nset(CMAKE_X 1 CACHE STRING "x")\n'
    assert unknown_options(make_recipe("mine", "f", [script], {}), declared) == ("GGML_OLD",)


@pytest.mark.parametrize(
    ("features", "architecture"),
    [
        ("fp asimd fphp asimdhp asimddp", "armv8.2-a+dotprod+fp16"),  # Cortex-A78AE, C-01
        ("fp asimd fphp asimdhp asimdrdm dcpop", "armv8.2-a+fp16"),  # Carmel, C-17: no asimddp
        ("fp asimd fphp asimdhp asimddp i8mm sve", "armv8.2-a+dotprod+fp16+i8mm"),
        ("fp asimd aes crc32", "armv8-a"),
    ],
)
def test_fc07_cpu_features_become_a_flag(features: str, architecture: str) -> None:
    assert arm_architecture(features.split()) == architecture


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=60))
def test_what_the_build_needs_is_never_dropped(path: str) -> None:
    for kept in ("CMakeLists.txt", "ggml/src/ggml.c", f"src/{path}", f"ggml/{path}", f"tools/server/{path}"):
        assert not dropped(kept, _TABLE["tree"]["drop"])


def test_the_table_is_whole() -> None:
    for name, known in _TABLE["recipes"].items():
        assert (Path(_BUILD) / f"{name}.cmake").is_file()
        assert known["cpu_minutes"] > 0 and known["disk"] and known["trust"]
    for pin in _TABLE["pins"]:
        assert re.fullmatch(r"[0-9a-f]{40}", pin["commit"])
        assert re.fullmatch(r"[0-9a-f]{64}", pin["pypi"]["sha256"])
