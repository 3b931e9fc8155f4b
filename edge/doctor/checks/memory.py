"""Memory: what is there, who holds it, and what swap can and cannot do. Pure."""

from __future__ import annotations

from edge.doctor.check import Check, ok, unknown, warn
from edge.doctor.facts import Facts, Process
from edge.units import GIB, KIB, format_bytes

_SMALL_BYTES = 17 * GIB  # boards on which a gigabyte decides which model fits
_LOW_SHARE = 0.5
_SWAPPINESS_MAX = 30
_SWAPPED_SHARE = 0.1


def available(facts: Facts) -> Check:
    """FC-17: MemAvailable counts. Free memory is small on a healthy system: the rest is cache that can go."""
    domain = "unified" if facts.board.unified_memory else "host"
    total, free = facts.memory.total_bytes.get(domain, 0), facts.memory.available_bytes.get(domain, 0)
    if not total:
        return unknown("memory.available", "/proc/meminfo cannot be read")
    says = f"{format_bytes(free)} of {format_bytes(total)} available"
    if facts.use.free_bytes is not None and facts.use.free_bytes < free // 2:
        says += f" (only {format_bytes(facts.use.free_bytes)} unused: the rest is file cache, which goes when needed)"
    if free >= total * _LOW_SHARE:
        return ok("memory.available", says)
    return warn("memory.available", says, "stop what is not needed: memory.holders names the biggest")


def holders(facts: Facts) -> Check | None:
    """On a Jetson GPU memory is in no process's size: NvMap's own list has it, for root."""
    if not facts.use.biggest:
        return None
    says = f"the biggest: {_named(facts.use.biggest)}"
    if facts.use.on_gpu:
        says += f"; on the GPU: {_named(facts.use.on_gpu)}"
    elif facts.board.soc is not None:
        says += "; GPU memory by process is shown to root only"
    return ok("memory.holders", says)


def _named(processes: tuple[Process, ...]) -> str:
    return ", ".join(f"{p.name} {format_bytes(p.bytes)} (pid {p.pid})" for p in processes)


def limit(facts: Facts) -> Check | None:
    notes = [note for note in facts.memory.notes if note.startswith("cgroup")]
    if not notes:
        return None
    return warn(
        "memory.limit", notes[0], "raise MemoryMax= of the unit, or --memory of the container, if it is too small"
    )


def desktop(facts: Facts) -> Check | None:
    if not facts.board.unified_memory:
        return None
    found = facts.use.desktop
    if found is None:
        return ok("memory.desktop", "headless: no desktop holds memory")
    says = f"a desktop is running ({found.name}, pid {found.pid})"
    if facts.board.memory_bytes > _SMALL_BYTES:
        return ok("memory.desktop", f"{says}: this board can afford it")
    step = "boot without it: that frees about 0.8 to 2 GB for the model"
    return warn("memory.desktop", says, step, "sudo systemctl set-default multi-user.target")


def zram(facts: Facts) -> Check | None:
    """zram cannot take GPU pages (they are pinned), and compressing costs the CPU and memory that a load wants."""
    devices = [swap for swap in facts.use.swaps if swap.kind == "zram"]
    if not devices:
        return None
    says = f"zram swap: {len(devices)} devices, {format_bytes(sum(swap.bytes for swap in devices))}"
    if not facts.board.unified_memory or facts.board.memory_bytes > _SMALL_BYTES:
        return ok("memory.zram", f"{says}; it adds nothing to what a model may use")
    step = "on a small board a swap file on NVMe serves the rest of the system better: GPU memory is never compressed"
    return warn("memory.zram", says, step, "sudo systemctl disable --now nvzramconfig")


def swap(facts: Facts) -> Check:
    others = [swap for swap in facts.use.swaps if swap.kind != "zram"]
    swapped, total = facts.use.swapped_bytes, facts.board.memory_bytes
    if total and swapped > total * _SWAPPED_SHARE:
        says = f"{format_bytes(swapped)} are swapped out: something does not fit"
        return warn("memory.swap", says, "stop what is not needed before a model is loaded")
    cards = [swap.device for swap in others if "mmcblk" in swap.device]
    if cards:
        return warn(
            "memory.swap", f"swap on {cards[0]}", "swap wears out SD cards and eMMC: put it on NVMe or do without"
        )
    if not facts.use.swaps:
        return ok("memory.swap", "no swap: right for a model server, whose memory must not be swapped")
    size = format_bytes(sum(swap.bytes for swap in facts.use.swaps))
    return ok("memory.swap", f"{size} swap; it is never counted as memory for a model")


def swappiness(facts: Facts) -> Check | None:
    value = facts.use.swappiness
    if value is None or not facts.use.swaps:
        return None
    if value <= _SWAPPINESS_MAX or facts.board.memory_bytes > _SMALL_BYTES or not facts.board.unified_memory:
        return ok("memory.swappiness", f"vm.swappiness is {value}")
    step = "at 10 the kernel drops file cache before it swaps out programs that answer requests"
    return warn("memory.swappiness", f"vm.swappiness is {value}", step, "sudo sysctl vm.swappiness=10")


def oom_kills(facts: Facts) -> Check | None:
    """FC-20: hours of calm, then the kernel takes the server. The counter is the proof that it happened."""
    count = facts.use.oom_kills
    if count is None:
        return None
    if count == 0:
        return ok("memory.oom", "the kernel has killed nothing for lack of memory since boot")
    says = f"the kernel has killed {count} process{'es' if count > 1 else ''} for lack of memory since boot"
    return warn(
        "memory.oom",
        says,
        "see which, and lower the context or the prompt cache",
        "journalctl -k -g 'Out of memory|oom-kill'",
    )


def locking(facts: Facts) -> Check | None:
    """FC-82: nothing is locked unless asked, so a small limit is no fault."""
    limit_bytes = facts.use.memlock_bytes
    if limit_bytes is None:
        return None
    size = "unlimited" if limit_bytes < 0 else format_bytes(limit_bytes)
    small = 0 <= limit_bytes < 64 * KIB * KIB
    note = "; enough, because models are not locked in memory" if small else ""
    return ok("memory.lock", f"lock limit {size}{note}")


CHECKS = (available, holders, limit, desktop, zram, swap, swappiness, oom_kills, locking)
