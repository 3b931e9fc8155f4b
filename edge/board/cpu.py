"""Read the CPU from /proc/cpuinfo and sysfs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from edge.board.board import Cpu
from edge.linux.tree import Tree, parse_count

# Features that llama.cpp's CPU kernels are compiled for.
_X86 = ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "fma", "f16c", "bmi2", "sse4_2")
_ARM = ("asimd", "fphp", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme")
_CPUS = "/sys/devices/system/cpu"
_CPUS_MAX = 8191  # CPU numbers of the largest kernel configuration (NR_CPUS 8192)


def machine(tree: Tree) -> str:
    """Return `x86_64` or `aarch64`, from the form of /proc/cpuinfo: uname does not know a copied tree."""
    fields = next(_blocks(tree.text("/proc/cpuinfo") or ""), {})
    return "aarch64" if "Features" in fields or "CPU implementer" in fields else "x86_64"


def read(tree: Tree, parts: Callable[[], Mapping[str, str]]) -> Cpu:
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
