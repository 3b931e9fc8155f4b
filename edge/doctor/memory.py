"""Checks of memory, swap and kills by the kernel, and how their facts are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from edge.board import memory
from edge.board.storage import classify, device_storage, unescaped
from edge.doctor.check import Finding, ok, unknown, warn
from edge.doctor.facts import DoctorFacts, MemoryUse, Process, Swap
from edge.linux.tree import Tree, parse_count
from edge.units import GIB, KIB, MIB, counted, format_bytes

_SMALL_BYTES = 17 * GIB  # 16 GB boards and smaller, on which a gigabyte decides which model fits
_LOW_SHARE = 0.5  # without a desktop 80 % of an Orin Nano and 72 % of an AGX Orin are available (/proc/meminfo)
_SWAPPINESS_MAX = 30  # the kernel's default is 60; below 30 file cache goes before anonymous pages
_CARDS = ("sd", "emmc")
_SWAPPED_SHARE = 0.1  # below it are pages of daemons that were never used again


def available(facts: DoctorFacts) -> Finding:
    """Check MemAvailable, not MemFree, which is small on a healthy system with a full file cache (FC-17)."""
    domain = "unified" if facts.board.unified_memory else "host"
    total, free = facts.memory.total_bytes.get(domain, 0), facts.memory.available_bytes.get(domain, 0)
    if not total:
        return unknown("/proc/meminfo cannot be read")
    says = f"{format_bytes(free)} of {format_bytes(total)} available"
    if facts.use.free_bytes is not None and facts.use.free_bytes < free // 2:
        says += f" (only {format_bytes(facts.use.free_bytes)} unused: the kernel drops the file cache when needed)"
    if free >= total * _LOW_SHARE:
        return ok(says)
    return warn(says, f"stop processes that are not needed{_biggest(facts)}")


def _biggest(facts: DoctorFacts) -> str:
    """Name the biggest processes. On a Jetson GPU memory is in no process's RSS: NvMap lists it, for root."""
    if not facts.use.biggest:
        return ""
    text = f"; the biggest: {_named(facts.use.biggest)}"
    if facts.use.on_gpu:
        return f"{text}; on the GPU: {_named(facts.use.on_gpu)}"
    return f"{text}; run as root to see GPU memory by process" if facts.board.soc is not None else text


def _named(processes: tuple[Process, ...]) -> str:
    return ", ".join(f"{p.name} {format_bytes(p.bytes)} (pid {p.pid})" for p in processes)


def limit(facts: DoctorFacts) -> Finding | None:
    """Warn where a cgroup limit is below the machine's memory."""
    notes = [note for note in facts.memory.notes if note.startswith("cgroup")]
    if not notes:
        return None
    return warn(notes[0], "raise MemoryMax= of the unit, or --memory of the container, if it is too small")


def desktop(facts: DoctorFacts) -> Finding | None:
    """Warn of a desktop session on a board with unified memory."""
    if not facts.board.unified_memory:
        return None
    found = facts.use.desktop
    if found is None:
        return ok("headless: no desktop session")
    says = f"a desktop is running ({found.name}, pid {found.pid})"
    if facts.board.memory_bytes > _SMALL_BYTES:
        return ok(f"{says}: this board has memory enough")
    step = "boot without it: that frees about 0.8 to 2 GB for the model"
    return warn(says, step, "sudo systemctl set-default multi-user.target")


def zram(facts: DoctorFacts) -> Finding | None:
    """Warn of zram on a small board: GPU pages are pinned and cannot be compressed, and compression costs CPU."""
    devices = [swap for swap in facts.use.swaps if swap.kind == "zram"]
    if not devices:
        return None
    says = f"zram swap: {counted(len(devices), 'device')}, {format_bytes(sum(swap.bytes for swap in devices))}"
    if not facts.board.unified_memory or facts.board.memory_bytes > _SMALL_BYTES:
        return ok(f"{says}; it adds no memory for a model")
    step = "on a small board use a swap file on NVMe instead: GPU memory is never compressed"
    return warn(says, step, "sudo systemctl disable --now nvzramconfig")


def swap(facts: DoctorFacts) -> Finding:
    """Warn of memory that is swapped out and of swap on flash cards."""
    others = [swap for swap in facts.use.swaps if swap.kind != "zram"]
    swapped, total = facts.use.swapped_bytes, facts.board.memory_bytes
    if total and swapped > total * _SWAPPED_SHARE:
        says = f"{format_bytes(swapped)} are swapped out: the processes do not fit in memory"
        return warn(says, "stop processes that are not needed before a model is loaded")
    cards = [swap for swap in others if swap.storage is not None and swap.storage.kind in _CARDS]
    if cards:
        return warn(f"swap on {_where(cards[0])}", "swap wears out SD cards and eMMC: put it on NVMe or do without")
    if not facts.use.swaps:
        return ok("no swap: right for a model server, whose memory must not be swapped")
    size = format_bytes(sum(swap.bytes for swap in facts.use.swaps))
    return ok(f"{size} swap; it is never counted as memory for a model")


def _where(swap: Swap) -> str:
    """Return `/dev/mmcblk0p2`, or `/swapfile, a file on mmcblk0`."""
    disk = swap.storage.disk if swap.storage is not None else None
    return f"{swap.device}, a file on {disk}" if swap.kind == "file" and disk else swap.device


def swappiness(facts: DoctorFacts) -> Finding | None:
    """Warn of the kernel's default vm.swappiness on a small board with swap."""
    value = facts.use.swappiness
    if value is None or not facts.use.swaps:
        return None
    if value <= _SWAPPINESS_MAX or facts.board.memory_bytes > _SMALL_BYTES or not facts.board.unified_memory:
        return ok(f"vm.swappiness is {value}")
    step = "at 10 the kernel drops file cache before it swaps out programs that answer requests"
    return warn(f"vm.swappiness is {value}", step, "sudo sysctl vm.swappiness=10")


def oom_kills(facts: DoctorFacts) -> Finding | None:
    """Warn where the kernel's counter shows kills for memory since boot (FC-20)."""
    count = facts.use.oom_kills
    if count is None:
        return None
    if count == 0:
        return ok("the kernel has killed nothing for lack of memory since boot")
    says = f"the kernel has killed {counted(count, 'process', 'processes')} for lack of memory since boot"
    return warn(
        says, "see which, and lower the context or the prompt cache", "journalctl -k -g 'Out of memory|oom-kill'"
    )


CHECKS = {
    "memory.available": available,
    "memory.limit": limit,
    "memory.desktop": desktop,
    "memory.zram": zram,
    "memory.swap": swap,
    "memory.swappiness": swappiness,
    "memory.oom": oom_kills,
}


# Read how processes and swap use the memory.

_DESKTOPS = (
    "gnome-shell",
    "Xorg",
    "Xwayland",
    "plasmashell",
    "kwin",
    "lxqt-session",
    "xfce4-session",
    "weston",
    "mutter",
)
_BIGGEST = 3
# debugfs, for root only. One line a client of NvMap, the allocator of GPU memory on Tegra.
_NVMAP = "/sys/kernel/debug/nvmap/iovmm/maps"
_NVMAP_LINE = re.compile(r"^user\s+(\S+)\s+(\d+)\s+(\d+)([KMG])\s*$", re.MULTILINE)
_UNITS = {"K": KIB, "M": MIB, "G": GIB}


def read_memory_use(tree: Tree) -> MemoryUse:
    """Read swap, the biggest processes, the desktop and the kernel's kill counter."""
    values = memory.parse(tree.text("/proc/meminfo") or "")
    running = list(processes(tree))
    desktop = [process for process in running if process.name.startswith(_DESKTOPS)]
    return MemoryUse(
        swaps=tuple(swaps(tree)),
        swappiness=tree.number("/proc/sys/vm/swappiness"),
        oom_kills=tree.counts("/proc/vmstat").get("oom_kill"),
        biggest=tuple(sorted(running, key=lambda process: -process.bytes)[:_BIGGEST]),
        on_gpu=tuple(sorted(_on_gpu(tree), key=lambda process: -process.bytes)[:_BIGGEST]),
        desktop=max(desktop, key=lambda process: process.bytes, default=None),
        free_bytes=values.get("MemFree"),
        swapped_bytes=max(0, values.get("SwapTotal", 0) - values.get("SwapFree", 0)),
    )


def swaps(tree: Tree) -> Iterator[Swap]:
    """Yield the lines of /proc/swaps: file name, type, size and used in KiB."""
    for line in list(tree.lines("/proc/swaps"))[1:]:
        words = line.split()
        size, used = (parse_count(word) for word in words[2:4]) if len(words) >= 4 else (None, None)
        if size is not None and used is not None:
            kind = "zram" if "/zram" in words[0] else words[1]
            name = unescaped(words[0]).removesuffix(" (deleted)")
            storage = classify(tree, Path(name)) if kind == "file" else device_storage(tree, name)
            yield Swap(name, kind, size * KIB, used * KIB, storage)


def processes(tree: Tree) -> Iterator[Process]:
    """Yield each process with its own memory. GPU memory of a Jetson is in no process's RSS."""
    for name in tree.children("/proc"):
        if not name.isdecimal():
            continue
        status = memory.parse(tree.text(f"/proc/{name}/status") or "")
        # Not VmRSS: it counts the mapped pages of a model, which the kernel can drop.
        own = status.get("RssAnon", 0) + status.get("RssShmem", 0)
        if own:
            yield Process(int(name), tree.word(f"/proc/{name}/comm") or "?", own)


def _on_gpu(tree: Tree) -> Iterator[Process]:
    """Yield NvMap's clients: one line `user  NAME  PID  SIZEK` each."""
    for name, pid, size, unit in _NVMAP_LINE.findall(tree.text(_NVMAP) or ""):
        yield Process(int(pid), name, int(size) * _UNITS[unit])
