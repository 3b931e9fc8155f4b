"""Read how processes and swap use the memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edge.board import meminfo
from edge.board.tree import Tree
from edge.doctor.facts import MemoryUse, Process, Swap
from edge.units import GIB, KIB, MIB

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
_NVMAP = "/sys/kernel/debug/nvmap/iovmm/maps"
_NVMAP_LINE = re.compile(r"^user\s+(\S+)\s+(\d+)\s+(\d+)([KMG])\s*$", re.MULTILINE)
_UNITS = {"K": KIB, "M": MIB, "G": GIB}


def read_memory_use(tree: Tree) -> MemoryUse:
    """Read swap, the biggest processes, the desktop and the kernel's kill counter."""
    values = meminfo.parse(tree.text("/proc/meminfo") or "")
    running = list(processes(tree))
    desktop = [process for process in running if process.name.startswith(_DESKTOPS)]
    return MemoryUse(
        swaps=tuple(swaps(tree)),
        swappiness=tree.number("/proc/sys/vm/swappiness"),
        oom_kills=_oom_kills(tree),
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
        if len(words) >= 4 and words[2].isdecimal() and words[3].isdecimal():
            kind = "zram" if "/zram" in words[0] else words[1]
            yield Swap(words[0], kind, int(words[2]) * KIB, int(words[3]) * KIB)


def processes(tree: Tree) -> Iterator[Process]:
    """Yield each process with its own memory. GPU memory of a Jetson is in no process's RSS."""
    for name in tree.children("/proc"):
        if not name.isdecimal():
            continue
        status = meminfo.parse(tree.text(f"/proc/{name}/status") or "")
        own = status.get("RssAnon", 0) + status.get("RssShmem", 0)
        if own:
            yield Process(int(name), tree.word(f"/proc/{name}/comm") or "?", own)


def _on_gpu(tree: Tree) -> Iterator[Process]:
    """Yield NvMap's clients: one line `user  NAME  PID  SIZEK` each."""
    for name, pid, size, unit in _NVMAP_LINE.findall(tree.text(_NVMAP) or ""):
        yield Process(int(pid), name, int(size) * _UNITS[unit])


def _oom_kills(tree: Tree) -> int | None:
    for line in tree.lines("/proc/vmstat"):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdecimal():
            return int(value)
    return None
