"""Identify the machine: Jetson or computer, CPU, GPUs, memory, releases."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from edge.board import cgroup, jetson, memory
from edge.board.board import VARIABLE, Board, Cpu, Gpu, newest_capability, visible
from edge.board.jetson import Jetson
from edge.board.memory import MemorySnapshot
from edge.board.tables import table
from edge.linux.tree import Tree, parse_count

# Detect the kind of container or guest, as one word.


def read(tree: Tree) -> str | None:
    """Return `wsl2`, `docker`, `podman`, `kubernetes`, `systemd-nspawn`, `lxc`, …; None outside of any."""
    return "wsl2" if is_wsl(tree) else inside(tree)


def inside(tree: Tree) -> str | None:
    """Return the container, also within WSL2."""
    if tree.exists("/var/run/secrets/kubernetes.io") or tree.exists("/run/secrets/kubernetes.io"):
        return "kubernetes"
    if tree.exists("/run/.containerenv"):
        return "podman"
    if tree.exists("/.dockerenv"):
        return "docker"
    manager = tree.word("/run/systemd/container") or tree.word("/run/host/container-manager")
    if manager:
        return manager
    for entry in (tree.text("/proc/1/environ") or "").split("\0"):
        name, _, value = entry.partition("=")
        if name == "container" and value:
            return value
    return None


def is_wsl(tree: Tree) -> bool:
    """Return whether this is WSL2, which has a GPU through /dev/dxg."""
    version = (tree.text("/proc/version") or "").lower()
    return "microsoft" in version and ("wsl2" in version or tree.exists("/dev/dxg"))


# nvpmodel's cap of the memory clock: JetPack 6 and later, JetPack 4 and 5.
_MEMORY_CLOCK_CAPS = ("/sys/kernel/nvpmodel_clk_cap/emc", "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap")


def probe(root: Path = Path("/")) -> Board:
    """Read the machine under `root`, without the GPUs that CUDA_VISIBLE_DEVICES hides.

    Never fails: unknown values are None, assumptions are noted.
    """
    tree = Tree(root)
    memory_bytes = memory.parse(tree.text("/proc/meminfo") or "").get("MemTotal", 0)
    cores = _usable(tree, read_cpu(tree, lambda: table().cpus))
    found = jetson.read(tree, memory_bytes // 1024)
    if found is not None:
        return visible(_jetson(tree, found, cores, memory_bytes), os.environ.get(VARIABLE))
    return visible(_computer(tree, cores, memory_bytes), os.environ.get(VARIABLE))


def _usable(tree: Tree, cores: Cpu) -> Cpu:
    """Limit the cores to affinity and CPU quota: more threads than that make llama.cpp slower."""
    allowed: list[float] = [quota] if (quota := cgroup.cpu_quota(tree)) else []
    if tree.live:
        allowed.append(len(os.sched_getaffinity(0)))
    usable = max(1, math.floor(min(allowed, default=cores.physical_cores) + 0.5))
    return replace(cores, usable_cores=usable) if usable < cores.physical_cores else cores


def _jetson(tree: Tree, found: Jetson, cores: Cpu, memory_bytes: int) -> Board:
    release = jetson.identify(
        _l4t_version(tree), jetson.major_from_kernel(tree.text("/proc/version") or "", found.soc.l4t), table().releases
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
        power_mode=jetson.active(tree.text("/var/lib/nvpmodel/status"), tree.text("/etc/nvpmodel.conf")),
        container=read(tree),
        notes=tuple(notes),
        refused=found.soc.refused,
        model=found.model,
    )


def _l4t_version(tree: Tree) -> str | None:
    version = jetson.from_release_file(tree.text("/etc/nv_tegra_release") or "")
    return version or jetson.from_dpkg_status(tree.text("/var/lib/dpkg/status") or "")


def _computer(tree: Tree, cores: Cpu, memory_bytes: int) -> Board:
    from edge.board import nvidia  # late: a Jetson does not need it

    reading = nvidia.read(tree)
    machine = machine_name(tree)
    gpus = tuple(found.gpu for found in reading.gpus)
    # DGX Spark and similar: NVML answers and reports a GPU without memory of its own.
    unified = bool(gpus) and reading.source != "proc" and all(gpu.memory_bytes is None for gpu in gpus)
    product = tree.word("/sys/devices/virtual/dmi/id/product_name")
    return Board(
        id=machine,
        module=product or f"{machine} machine",
        soc=None,
        compute_capability=newest_capability(gpus),
        memory_bytes=memory_bytes,
        unified_memory=unified,
        cpu=cores,
        gpus=gpus,
        cuda=reading.cuda,
        container=read(tree),
        notes=reading.notes + (("the GPU shares the machine's memory",) if unified else ()),
        driver=reading.driver,
    )


# Read the CPU from /proc/cpuinfo and sysfs.

# Features that llama.cpp's CPU kernels are compiled for.
_X86 = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "fma", "f16c", "bmi2", "sse4_2")
_ARM = ("asimd", "fphp", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme")
_CPUS = "/sys/devices/system/cpu"
_CPUS_MAX = 8191  # CPU numbers of the largest kernel configuration (NR_CPUS 8192)


def machine_name(tree: Tree) -> str:
    """Return `x86_64` or `aarch64`, from the form of /proc/cpuinfo: uname does not know a copied tree."""
    fields = next(_blocks(tree.text("/proc/cpuinfo") or ""), {})
    return "aarch64" if "Features" in fields or "CPU implementer" in fields else "x86_64"


def read_cpu(tree: Tree, parts: Callable[[], Mapping[str, str]]) -> Cpu:
    """Read the CPU. `parts` names ARM cores by `implementer:part`; other CPUs have a model name."""
    blocks = list(_blocks(tree.text("/proc/cpuinfo") or ""))
    first = blocks[0] if blocks else {}
    flags = (first.get("flags") or first.get("Features") or "").split()
    online = online_cpus(tree) or set(range(len(blocks))) or {0}
    return Cpu(
        name=_name(first, parts),
        physical_cores=_physical(tree, online, blocks),
        logical_cores=len(online),
        isa=tuple(flag for flag in _X86 + _ARM if flag in flags),
    )


def online_cpus(tree: Tree) -> set[int]:
    """Return the numbers of online CPUs: a power mode takes some offline."""
    return expand(tree.word(f"{_CPUS}/online") or "")


def expand(ranges: str) -> set[int]:
    """Expand `0-3,8` to {0, 1, 2, 3, 8}. Other text, and numbers that no kernel has, are left out."""
    numbers: set[int] = set()
    for part in ranges.split(","):
        low, _, high = part.strip().partition("-")
        first, last = parse_count(low), parse_count(high)
        if first is not None:
            numbers.update(range(first, min(first if last is None else last, _CPUS_MAX) + 1))
    return numbers


def _physical(tree: Tree, online: set[int], blocks: list[dict[str, str]]) -> int:
    """Count cores by thread_siblings; without sysfs by (package, core) of cpuinfo; else count CPUs."""
    cores = set()
    for number in online:
        topology = f"{_CPUS}/cpu{number}/topology"
        siblings = tree.word(f"{topology}/core_cpus_list") or tree.word(f"{topology}/thread_siblings_list")
        if siblings is None:
            break
        cores.add(frozenset(expand(siblings) & online))
    else:
        return len(cores)
    pairs = {(block.get("physical id"), block["core id"]) for block in blocks if "core id" in block}
    return len(pairs) or len(online)


def _name(fields: Mapping[str, str], parts: Callable[[], Mapping[str, str]]) -> str:
    key = f"{fields.get('CPU implementer', '').lower()}:{fields.get('CPU part', '').lower()}"
    known = parts().get(key) if "CPU part" in fields else None
    return known or " ".join(fields.get("model name", "").split()) or "unknown CPU"


def _blocks(cpuinfo: str) -> Iterator[dict[str, str]]:
    """Yield one dict a processor."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if name.strip() == "processor" and fields:
            yield fields
            fields = {}
        if colon:
            fields[name.strip()] = value.strip()
    if fields:
        yield fields


# Build the JSON document of `edgellm board --json`. Pure.

SCHEMA = 1


def document(board: Board, memory: MemorySnapshot) -> dict[str, Any]:
    """Build the document of a board and its memory."""
    return {"schema": SCHEMA, "board": to_builtins(board), "memory": to_builtins(memory)}
