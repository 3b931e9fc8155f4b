"""Identify the machine: Jetson or computer, CPU, GPUs, memory, releases."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from edge.board import cgroup, container, cpu, jetson, l4t, meminfo, power
from edge.board.board import Board, Cpu, Gpu
from edge.board.jetson import Jetson
from edge.board.table import table
from edge.board.tree import Tree

_MEMORY_CLOCK_CAPS = ("/sys/kernel/nvpmodel_clk_cap/emc", "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap")


def probe(root: Path = Path("/")) -> Board:
    """Read the machine under `root`. Never fails: unknown values are None, assumptions are noted."""
    tree = Tree(root)
    memory_bytes = meminfo.parse(tree.text("/proc/meminfo") or "").get("MemTotal", 0)
    cores = _usable(tree, cpu.read(tree, lambda: table().cpus))
    found = jetson.read(tree, memory_bytes // 1024)
    if found is not None:
        return _jetson(tree, found, cores, memory_bytes)
    return _computer(tree, cores, memory_bytes)


def _usable(tree: Tree, cores: Cpu) -> Cpu:
    """Limit the cores to affinity and CPU quota: more threads than that make llama.cpp slower."""
    allowed: list[float] = [quota] if (quota := cgroup.cpu_quota(tree)) else []
    if tree.live:
        allowed.append(len(os.sched_getaffinity(0)))
    usable = max(1, math.floor(min(allowed, default=cores.physical_cores) + 0.5))
    return replace(cores, usable_cores=usable) if usable < cores.physical_cores else cores


def _jetson(tree: Tree, found: Jetson, cores: Cpu, memory_bytes: int) -> Board:
    release = l4t.identify(
        _l4t_version(tree), l4t.major_from_kernel(tree.text("/proc/version") or ""), table().releases
    )
    cap = next((value for path in _MEMORY_CLOCK_CAPS if (value := tree.number(path))), None)
    row = found.row
    notes = [*found.notes, *([release.note] if release.note else [])]
    return Board(
        id=row.id if row else found.soc.name.lower(),
        module=row.name if row else found.model or f"Jetson {found.soc.name}",
        soc=found.soc.name,
        compute_capability=found.soc.compute_capability,
        memory_bytes=memory_bytes,
        unified_memory=True,
        cpu=cores,
        gpus=(Gpu(found.soc.gpu_name, compute_capability=found.soc.compute_capability),),
        bandwidth_bytes_s=jetson.bandwidth_bytes_s(row, found.super_image, cap) if row else None,
        l4t=release.version,
        jetpack=release.jetpack,
        cuda=release.cuda,
        power_mode=power.active(tree.text("/var/lib/nvpmodel/status"), tree.text("/etc/nvpmodel.conf")),
        container=container.read(tree),
        notes=tuple(notes),
        refused=found.soc.refused,
        model=found.model,
    )


def _l4t_version(tree: Tree) -> str | None:
    version = l4t.from_release_file(tree.text("/etc/nv_tegra_release") or "")
    return version or l4t.from_dpkg_status(tree.text("/var/lib/dpkg/status") or "")


def _computer(tree: Tree, cores: Cpu, memory_bytes: int) -> Board:
    from edge.board import nvidia  # late: a Jetson does not need it

    reading = nvidia.read(tree)
    machine = cpu.machine(tree)
    gpus = tuple(found.gpu for found in reading.gpus)
    # DGX Spark and similar: NVML answers and reports a GPU without memory of its own.
    unified = bool(gpus) and reading.source != "proc" and all(gpu.memory_bytes is None for gpu in gpus)
    product = tree.word("/sys/devices/virtual/dmi/id/product_name")
    return Board(
        id=machine,
        module=product or f"{machine} machine",
        soc=None,
        compute_capability=min(
            (g.compute_capability for g in gpus if g.compute_capability), key=_version, default=None
        ),
        memory_bytes=memory_bytes,
        unified_memory=unified,
        cpu=cores,
        gpus=gpus,
        cuda=reading.cuda,
        container=container.read(tree),
        notes=reading.notes + (("the GPU shares the machine's memory",) if unified else ()),
        driver=reading.driver,
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
