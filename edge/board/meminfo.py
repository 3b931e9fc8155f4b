"""Parse /proc/meminfo to bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def parse(text: str) -> dict[str, int]:
    """Return bytes by name. Lines without kB (HugePages_Total) are counts and left out."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            values[name.strip()] = int(words[0]) * 1024
    return values


def available_bytes(values: Mapping[str, int]) -> tuple[int, str | None]:
    """Return (MemAvailable, None); for a kernel without that line an estimate and a note (FC-17).

    The estimate adds to the free pages half of the file cache beyond tmpfs and half of the reclaimable slab. Half,
    because a working system reads the rest again: the kernel's si_mem_available() keeps back half at most, too.
    """
    if "MemAvailable" in values:
        return values["MemAvailable"], None
    cache = max(0, values.get("Cached", 0) + values.get("Buffers", 0) - values.get("Shmem", 0))
    estimate = values.get("MemFree", 0) + cache // 2 + values.get("SReclaimable", 0) // 2
    return estimate, "this kernel has no MemAvailable line: estimated from free memory and half of the file cache"
