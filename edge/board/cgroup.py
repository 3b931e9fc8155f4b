"""Read the limits of this process's control group, v2 or v1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from msgspec import Struct

from edge.linux.tree import Tree, parse_count

# The unified hierarchy; beside v1 controllers systemd mounts it one folder deeper.
_V2 = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")


class Limit(Struct, frozen=True):
    """The tightest memory limit. `left_bytes` counts the group's file cache as free: the kernel drops it first.

    Above memory.high the kernel reclaims and throttles the group instead of killing it: no less a limit for a plan.
    """

    limit_bytes: int
    left_bytes: int
    where: str  # "cgroup v2 /user.slice"


def memory_limit(tree: Tree, total_bytes: int) -> Limit | None:
    """Return the limit that leaves least; None when none is below the machine's memory."""
    v2 = _limits(tree, "", _V2, ("memory.max", "memory.current"), "cgroup v2")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    v1 = _limits(tree, "memory", ("/sys/fs/cgroup/memory",), names, "cgroup v1")
    real = [limit for limit in (*v2, *v1) if limit.limit_bytes < total_bytes]
    return min(real, key=lambda limit: limit.left_bytes, default=None)


def oom_kills(tree: Tree) -> int | None:
    """Return how many processes the kernel killed in this group for want of memory; None without the counter."""
    # Our own group alone: the counter of an ancestor counts other groups too.
    own = next(_levels(tree, "", _V2), None)
    return tree.counts(f"{own[0]}/memory.events").get("oom_kill") if own else None


def group_bytes(tree: Tree, pid: int) -> int | None:
    """Return the memory of a process's own v2 group without its file cache; None where it shares ours, or has none."""
    path = next((line[3:] for line in tree.lines(f"/proc/{pid}/cgroup") if line.startswith("0::")), None)
    if path is None or path == _own_paths(tree).get("") or path == "/":
        return None
    for base in _V2:
        used = tree.number(f"{base}{path}/memory.current")
        if used is not None:
            return max(0, used - _file_cache(tree, f"{base}{path}"))
    return None


def cpu_quota(tree: Tree) -> float | None:
    """Return the group's CPU time in cores; None is unlimited."""
    quotas = []
    for folder, _ in _levels(tree, "", _V2):
        words = (tree.text(f"{folder}/cpu.max") or "").split()
        counts = [parse_count(word) for word in words]  # "max" is no number: not limited
        if len(counts) == 2 and counts[0] and counts[1]:
            quotas.append(counts[0] / counts[1])
    for folder, _ in _levels(tree, "cpu", ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")):
        quota, period = tree.number(f"{folder}/cpu.cfs_quota_us"), tree.number(f"{folder}/cpu.cfs_period_us")
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _limits(tree: Tree, controller: str, bases: tuple[str, ...], names: tuple[str, str], kind: str) -> Iterator[Limit]:
    for folder, level in _levels(tree, controller, bases):
        most, used = (tree.number(f"{folder}/{name}") for name in names)  # "max" is no number: not limited
        high = tree.number(f"{folder}/memory.high")
        limit = min((value for value in (most, high) if value is not None), default=None)
        if limit is not None and used is not None:
            left = max(0, limit - max(0, used - _file_cache(tree, folder)))
            yield Limit(limit, left, f"{kind} {level}" + (" (memory.high)" if limit != most else ""))


def _levels(tree: Tree, controller: str, bases: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (folder, group) from our own group to the top of the mount. In a container only the top may exist."""
    path = _own_paths(tree).get(controller)
    if path is None:
        return
    group = PurePosixPath("/" + path.lstrip("/"))
    for base in bases:
        for level in (group, *group.parents):
            yield f"{base}{level}".rstrip("/"), str(level)


def _own_paths(tree: Tree) -> dict[str, str]:
    """Parse /proc/self/cgroup to controller → path; the controller of v2 is ""."""
    paths: dict[str, str] = {}
    for line in tree.lines("/proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def _file_cache(tree: Tree, folder: str) -> int:
    stat = tree.counts(f"{folder}/memory.stat")
    prefix = "total_" if "total_inactive_file" in stat else ""
    return sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
