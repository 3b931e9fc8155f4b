"""Measure the machine that builds: GPUs, disk, memory, clock."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.board import memory
from edge.board.cgroup import cpu_quota, memory_limit
from edge.builder.preflight import BuildHost
from edge.builder.recipe import Recipe
from edge.builder.request import BuildRequest
from edge.builder.source import Pin, SourceArchive, pin_for
from edge.builder.toolchain import Tool, Toolchain, Toolkit, ask_gpu, numbers
from edge.linux.tree import Tree


def measure(request: BuildRequest, tools: Toolchain, source: SourceArchive, pin: Pin) -> BuildHost:
    """Measure disk, memory, cores and clock."""
    build = _existing(request.build_root)
    tmp = _existing(Path(request.environment.get("TMPDIR") or tempfile.gettempdir()))
    return BuildHost(
        toolchain=tools,
        build_free_bytes=shutil.disk_usage(build).free,
        tmp_free_bytes=shutil.disk_usage(tmp).free,
        memory_available_bytes=available_memory_bytes(Tree(request.root)),
        cores=usable_cores(Tree(request.root)),
        now_s=time.time(),
        newest_source_s=max(pin.released_s, newest_mtime_s(source.tree)),
        same_disk=build.stat().st_dev == tmp.stat().st_dev,
        glibc=glibc(),
        patched=any(has_new_declarations(Path(kit.nvcc)) for kit in tools.toolkits[:1]),
    )


def glibc() -> str | None:
    """Return the version of the C library, "2.36"; None for another library than glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None
    except (OSError, ValueError):
        return None


def has_new_declarations(nvcc: Path) -> bool:
    """Return whether this toolkit declares cospi() as glibc 2.41 does: it is new enough, or was patched."""
    for header in sorted(nvcc.parent.parent.glob("targets/*/include/crt/math_functions.h")):
        with contextlib.suppress(OSError):
            text = header.read_text(errors="replace")
            return re.search(r"\bcospi\(double \w+\)\s*(?:noexcept|__THROW)", text) is not None
    return False


def _existing(folder: Path) -> Path:
    while not folder.is_dir():
        folder = folder.parent
    return folder


def available_memory_bytes(tree: Tree) -> int:
    """Return MemAvailable, or what the control group leaves: a container's compilers are killed at its limit."""
    values = memory.parse(tree.text("/proc/meminfo") or "")
    available = values.get("MemAvailable", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # systemd units and containers are killed at memory.max, however much the machine has left.
    limit = memory_limit(tree, values.get("MemTotal", available))
    return min(available, limit.left_bytes) if limit else available


def usable_cores(tree: Tree) -> int:
    """Return the cores that this process may use, by affinity and by the control group's quota."""
    # os.cpu_count() knows neither: a container with two of 64 cores would start 64 compilers.
    quota = cpu_quota(tree)
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, round(quota))) if quota else cores


def newest_mtime_s(tree: Path) -> float:
    """Return the newest mtime of the files that a build reads; 0 without a tree."""
    newest = 0.0
    for folder, _, names in os.walk(tree):
        for name in names:
            # What cmake and the compilers read: a newer README must not look like a clock in the past.
            if name.endswith((".cpp", ".c", ".cu", ".cuh", ".h", ".txt", ".cmake")):
                newest = max(newest, Path(folder, name).stat().st_mtime)
    return newest


def find_arch(request: BuildRequest, recipe: Recipe) -> tuple[int, ...]:
    """Return the GPU architectures: --arch > the recipe's > the GPUs'. Only numbers reach cmake (FC-02)."""
    if not recipe.cuda:
        return ()
    if request.arch:
        return request.arch
    script = recipe.option("CMAKE_CUDA_ARCHITECTURES")
    if recipe.arch or script is not None:
        return recipe.arch or tuple(int(number) for number in re.findall(r"\d+", script or ""))
    known = [gpu.compute_capability for gpu in request.board.gpus if gpu.compute_capability]
    # nvidia-smi ignores CUDA_VISIBLE_DEVICES: it would name the cards that this hides.
    silent = request.stand_in or request.board.refused is not None
    found = known or (() if silent else ask_gpu(request.environment, request.root))
    if not found and request.board.compute_capability:
        found = (request.board.compute_capability,)
    return tuple(sorted({int(text.replace(".", "")) for text in found if re.fullmatch(r"\d{1,2}\.\d", text)}))


def assumed_toolchain(request: BuildRequest, recipe: Recipe, table: Mapping[str, Any]) -> Toolchain:
    """Return the toolchain of that board's stock image, for the commands of a dry run."""
    pin = pin_for(table, None)
    cuda = numbers(request.board.cuda) if request.board.cuda else pin.cuda_proven
    folder = f"cuda-{request.board.cuda}" if request.board.cuda else "cuda"
    kit = Toolkit(f"/usr/local/{folder}/bin/nvcc", cuda)
    machine = recipe.machine or os.uname().machine
    return Toolchain(
        machine,
        Tool("cmake", pin.cmake_min),
        Tool("ninja", (1,)),
        Tool("cc", (pin.gcc_min,)),
        (Tool("c++", (pin.gcc_min,)),),
        Tool("ccache", (4,)),
        (kit,) if recipe.cuda else (),
    )


def matching_cc(tools: Toolchain, cxx: Tool) -> Tool:
    """Return the C compiler beside a C++ compiler: gcc-12 for g++-12, where it is installed."""
    name = Path(cxx.path).name
    if name.startswith("g++-"):
        beside = Path(cxx.path).with_name(name.replace("g++", "gcc"))
        if beside.exists():
            return Tool(str(beside), cxx.version)
    return tools.cc or Tool("cc", ())
