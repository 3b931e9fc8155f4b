"""Read how much memory is available now, by domain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from edge.board import cgroup
from edge.board.board import Board
from edge.errors import UsageError
from edge.linux.tree import Tree, parse_count
from edge.units import GIB, format_bytes, parse_size

# Parse /proc/meminfo to bytes. Pure.


def parse(text: str) -> dict[str, int]:
    """Return bytes by name. Lines without kB (HugePages_Total) are counts and left out."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and (count := parse_count(words[0])) is not None:
            values[name.strip()] = count * 1024
    return values


def mem_available_bytes(values: Mapping[str, int]) -> tuple[int, str | None]:
    """Return (MemAvailable, None); for a kernel without that line an estimate and a note (FC-17).

    The estimate adds to the free pages half of the file cache beyond tmpfs and half of the reclaimable slab. Half,
    because a working system reads the rest again: the kernel's si_mem_available() keeps back half at most, too.
    """
    if "MemAvailable" in values:
        return values["MemAvailable"], None
    cache = max(0, values.get("Cached", 0) + values.get("Buffers", 0) - values.get("Shmem", 0))
    estimate = values.get("MemFree", 0) + cache // 2 + values.get("SReclaimable", 0) // 2
    return estimate, "this kernel has no MemAvailable line: estimated from free memory and half of the file cache"


class MemorySnapshot(Struct, frozen=True):
    """Bytes by domain: `unified` on a Jetson, else `host` and each GPU's UUID. Available is MemAvailable (FC-17)."""

    total_bytes: dict[str, int]
    available_bytes: dict[str, int]
    swap_bytes: int = 0  # shown, never counted
    notes: tuple[str, ...] = field(default=())


def snapshot(root: Path, board: Board, available_bytes: int | None = None) -> MemorySnapshot:
    """Read the machine under `root`. `available_bytes` (`--memory`) replaces that of the domain `unified` or `host`.

    Each discrete GPU is one more domain, read from the driver; one whose memory is unknown is left out, with a note.
    """
    tree = Tree(root)
    values = parse(tree.text("/proc/meminfo") or "")
    total = values.get("MemTotal", board.memory_bytes)
    available, note = mem_available_bytes(values)
    notes = [note] if note and available_bytes is None else []
    limit = cgroup.memory_limit(tree, total)
    if limit is not None:
        total = limit.limit_bytes
        # `--memory` is that of another moment or machine, to which the group's present use does not apply.
        if available_bytes is None and limit.left_bytes < available:
            available = limit.left_bytes
            notes.append(f"{limit.where} allows {format_bytes(limit.limit_bytes)}: less than the machine's memory")
    if available_bytes is not None:
        available = available_bytes
        notes.append(f"available memory given by hand: {format_bytes(available_bytes)}")
    domain = "unified" if board.unified_memory else "host"
    totals, free = {domain: total}, {domain: available}
    if not board.unified_memory:
        _add_gpus(tree, board, totals, free, notes)
    return MemorySnapshot(totals, free, values.get("SwapTotal", 0), tuple(notes))


def assumed(board: Board, available_bytes: int | None = None) -> MemorySnapshot:
    """Assume the memory of a named board (`--board`): a headless system after boot.

    That leaves an Orin Nano 8GB 1.5 GiB less than its total and an AGX Orin 64GB 3.2 GiB less, 5 % of the latter.
    """
    domain = "unified" if board.unified_memory else "host"
    own = max(int(1.5 * GIB), board.memory_bytes // 20) if board.memory_bytes > 4 * GIB else GIB
    how = "given by hand" if available_bytes is not None else "assumed for a headless system"
    free = {domain: available_bytes if available_bytes is not None else board.memory_bytes - own}
    totals = {domain: board.memory_bytes}
    note = f"available memory {how}: {format_bytes(free[domain])}"
    for gpu in board.gpus if not board.unified_memory else ():
        if gpu.uuid and gpu.memory_bytes:
            totals[gpu.uuid] = gpu.memory_bytes
            # An allowance for what the driver itself keeps on an idle GPU.
            free[gpu.uuid] = gpu.memory_bytes - gpu.memory_bytes // 50
    return MemorySnapshot(totals, free, notes=(note,))


def _add_gpus(tree: Tree, board: Board, totals: dict[str, int], free: dict[str, int], notes: list[str]) -> None:
    if not board.gpus:
        return
    from edge.board import nvidia

    readings = {reading.gpu.uuid: reading for reading in nvidia.read(tree).gpus}
    for gpu in board.gpus:
        now = readings.get(gpu.uuid)
        if gpu.uuid is None or now is None or now.gpu.memory_bytes is None or now.free_bytes is None:
            notes.append(f"free memory of {gpu.name} is unknown: the driver does not report it")
            continue
        totals[gpu.uuid], free[gpu.uuid] = now.gpu.memory_bytes, now.free_bytes


# The formula of memory that stays free: `1GiB`, `10%` of the total, or `max(1GiB, 10%)`. Pure.

DEFAULT_RESERVE = "max(1GiB, 10%)"
_CALL = re.compile(r"\s*(max|min)\(([^()]*)\)\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
# A KV cache of some thousand tokens, compute buffers, the CUDA context.
_ALLOWANCE_BYTES = GIB


def reserve_bytes(formula: str, total_bytes: int) -> int:
    """Return the reserve in bytes of `total_bytes` (MemTotal or a GPU's VRAM). Raises ValueError for a bad formula."""
    call = _CALL.fullmatch(formula)
    if call is None:
        return _term(formula, total_bytes)
    terms = [_term(part, total_bytes) for part in call[2].split(",")]
    return max(terms) if call[1] == "max" else min(terms)


def room_bytes(total: Mapping[str, int], available: Mapping[str, int], reserve: str) -> int:
    """Return the bytes available for weights in unified memory, else in the largest GPU, else in host memory.

    `reserve` is the configured formula. An allowance stands for KV cache and buffers, which follow from a header.
    """
    gpus = [domain for domain in available if domain not in ("unified", "host")]
    domain = "unified" if "unified" in available else max(gpus, key=lambda gpu: available[gpu], default="host")
    return max(0, available[domain] - reserve_bytes(reserve, total[domain]) - _ALLOWANCE_BYTES)


def check_reserve(formula: str) -> None:
    """Raise ValueError for a bad formula."""
    reserve_bytes(formula, 1 << 30)


def _term(text: str, total_bytes: int) -> int:
    percent = _PERCENT.fullmatch(text)
    if percent:
        share = float(percent[1])
        # A larger share leaves models next to nothing.
        if share > 90:
            raise ValueError(f"wants at most 90%, got {text.strip()}")
        return int(total_bytes * share / 100)
    try:
        return parse_size(text)
    except UsageError:
        raise ValueError(f"wants a size, a share, or max(1GiB, 10%), got {text.strip()!r}") from None
