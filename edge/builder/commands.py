"""Compute the commands of a build, with the reason for each argument. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from msgspec import Struct

from edge.builder.recipe import BuildOption, Recipe, arm_architecture
from edge.builder.toolchain import Tool, Toolkit

# -march for builds without native detection (FC-07): what every CPU of the machine's kind runs.
BASELINE = {"aarch64": "armv8-a"}


class Commands(Struct, frozen=True):
    """`overrides` are the -D arguments that this machine adds to the recipe, with their reasons."""

    configure: tuple[str, ...]
    build: tuple[str, ...]
    overrides: tuple[BuildOption, ...]
    fingerprint: str
    build_dir: str


class BuildInputs(Struct, frozen=True):
    """Everything that determines the build."""

    recipe: Recipe
    tree: str
    commit: str
    build_number: int
    arch: tuple[int, ...]
    machine: str
    isa: tuple[str, ...]
    cmake: Tool
    ninja: Tool
    cc: Tool
    cxx: Tool
    toolkit: Toolkit | None
    host_compiler: Tool | None
    targets: Sequence[str]
    jobs: int
    baseline: bool = False  # no native detection: after a header mismatch, or `--no-native`
    rpc: bool = False  # with llama.cpp's RPC backend and its server


def overrides(inputs: BuildInputs) -> tuple[BuildOption, ...]:
    """Return the options that depend on the machine, so that no recipe has them."""
    found = [
        BuildOption(
            "LLAMA_BUILD_COMMIT", inputs.commit[:9], "STRING", "what --version answers: the sdist has no history"
        ),
        BuildOption("LLAMA_BUILD_NUMBER", str(inputs.build_number), "STRING", "a shallow tree would count 1"),
        BuildOption("CMAKE_C_COMPILER", inputs.cc.path, "FILEPATH", "the compiler that was checked"),
        BuildOption("CMAKE_CXX_COMPILER", inputs.cxx.path, "FILEPATH", "the compiler that was checked"),
        BuildOption("CMAKE_MAKE_PROGRAM", inputs.ninja.path, "FILEPATH", "counts its steps, so progress is known"),
    ]
    if inputs.toolkit is not None:
        found.append(
            BuildOption(
                "CMAKE_CUDA_COMPILER", inputs.toolkit.nvcc, "FILEPATH", "nvcc is rarely on a service's PATH (FC-01)"
            )
        )
        if inputs.recipe.option("CMAKE_CUDA_ARCHITECTURES") is None:
            arch = ";".join(f"{a}-real" for a in inputs.arch)
            found.append(
                BuildOption("CMAKE_CUDA_ARCHITECTURES", arch, "STRING", "this machine's GPU, and no other (FC-02)")
            )
        # Plain text: these are paths of the board, which may not be this machine.
        root = inputs.toolkit.nvcc.rsplit("/", 2)[0]
        why = "the engine finds the toolkit's libraries with nothing in its environment (FC-10)"
        found.append(BuildOption("CMAKE_BUILD_RPATH", f"{root}/lib64;{root}/lib", "STRING", why))
    if inputs.host_compiler is not None and inputs.toolkit is not None:
        found.append(
            BuildOption("CMAKE_CUDA_HOST_COMPILER", inputs.host_compiler.path, "FILEPATH", "one that this nvcc takes")
        )
    return (*found, *_rpc(inputs), *_cpu(inputs))


def _rpc(inputs: BuildInputs) -> tuple[BuildOption, ...]:
    """Return the options of `--rpc`: the backend over TCP, also where libibverbs is installed."""
    if not inputs.rpc:
        return ()
    return (
        BuildOption("GGML_RPC", "ON", "BOOL", "layers on other boards, asked for with --rpc"),
        BuildOption("GGML_RPC_RDMA", "OFF", "BOOL", "no dependency on libibverbs, which a board lacks"),
    )


def _cpu(inputs: BuildInputs) -> tuple[BuildOption, ...]:
    """Return the CPU options. On aarch64 native detection is always off: gcc and ggml's probes disagree (FC-07)."""
    if inputs.baseline:
        why = "any CPU of this kind, not only what the compiler detects here (FC-07)"
        arm = BASELINE.get(inputs.machine)
        return (
            BuildOption("GGML_NATIVE", "OFF", "BOOL", why),
            *((BuildOption("GGML_CPU_ARM_ARCH", arm, "STRING", why),) if arm else ()),
        )
    if inputs.machine != "aarch64":
        return ()
    if inputs.recipe.option("GGML_CPU_ARM_ARCH") is not None:
        return ()
    return (
        BuildOption("GGML_NATIVE", "OFF", "BOOL", "native detection disagrees with itself on aarch64 (FC-07)"),
        BuildOption("GGML_CPU_ARM_ARCH", arm_architecture(inputs.isa), "STRING", "what /proc/cpuinfo states"),
    )


def fingerprint(inputs: BuildInputs) -> str:
    """Return the name of the build folder. Each recipe and toolchain has its own: an old CMakeCache would win."""
    parts = [
        inputs.commit,
        # Without a commit only the path of the tree distinguishes two sources.
        inputs.tree if inputs.commit == "unknown" else "",
        inputs.recipe.sha256,
        [[option.name, option.value] for option in overrides(inputs)],
        [inputs.cmake.text, inputs.cc.text, inputs.cxx.text, inputs.toolkit.text if inputs.toolkit else None],
        inputs.machine,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def commands(inputs: BuildInputs, build_root: str, *, keep: str | None = None) -> Commands:
    """Compute the commands. `keep`: the fingerprint of a build that is configured again in its own folder."""
    extra = overrides(inputs)
    name = keep or fingerprint(inputs)
    folder = f"{build_root}/{name}"
    configure = [inputs.cmake.path, "-C", inputs.recipe.script, "-S", inputs.tree, "-B", folder, "-G", "Ninja"]
    configure += [f"-D{option.name}={option.value}" for option in extra]
    build = [inputs.ninja.path, "-C", folder, "-j", str(inputs.jobs), *inputs.targets]
    return Commands(tuple(configure), tuple(build), extra, name, folder)


def estimate_minutes(recipe: Recipe, jobs: int) -> int:
    """Estimate the wall minutes on `jobs` server cores; a board's cores need about twice that."""
    # Compiling has no serial part worth counting: nvcc's jobs are independent, and linking takes seconds.
    return max(1, round(recipe.cpu_minutes / max(1, jobs)))
