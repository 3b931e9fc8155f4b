"""The memory limit of the control group that this process is in, v2 or v1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from edge.board.tree import Tree

_V2 = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
_V1 = "/sys/fs/cgroup/memory"


@dataclass(frozen=True, slots=True)
class Limit:
    """The tightest limit on the way up. `left_bytes` counts file cache of the group as free: the kernel drops it."""

    limit_bytes: int
    left_bytes: int
    where: str  # "cgroup v2 /user.slice"


def memory_limit(tree: Tree, total_bytes: int) -> Limit | None:
    """None when nothing is limited below the machine's own memory."""
    paths = _own_paths(tree)
    found: list[Limit] = []
    if "" in paths:
        for base in _V2:
            found += _walk(tree, base, paths[""], "memory.max", "memory.current", "cgroup v2")
    if "memory" in paths:
        found += _walk(tree, _V1, paths["memory"], "memory.limit_in_bytes", "memory.usage_in_bytes", "cgroup v1")
    real = [limit for limit in found if limit.limit_bytes < total_bytes]
    return min(real, key=lambda limit: limit.left_bytes, default=None)


def _own_paths(tree: Tree) -> dict[str, str]:
    """Controller → path of /proc/self/cgroup; "" is v2."""
    paths: dict[str, str] = {}
    for line in tree.lines("/proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def _walk(tree: Tree, base: str, path: str, limit_name: str, used_name: str, kind: str) -> list[Limit]:
    """Every limit between the group and the mount's top. In a container the path may not exist: its top does."""
    limits = []
    group = PurePosixPath("/" + path.lstrip("/"))
    for level in (group, *group.parents):
        folder = f"{base}{level}".rstrip("/")
        limit = tree.number(f"{folder}/{limit_name}")  # "max" is no number: not limited
        used = tree.number(f"{folder}/{used_name}")
        if limit is not None and used is not None:
            left = max(0, limit - max(0, used - _file_cache(tree, folder)))
            limits.append(Limit(limit, left, f"{kind} {level}"))
    return limits


def _file_cache(tree: Tree, folder: str) -> int:
    stat = dict(line.split(maxsplit=1) for line in tree.lines(f"{folder}/memory.stat") if " " in line)
    names = (
        ("total_inactive_file", "total_active_file")
        if "total_inactive_file" in stat
        else ("inactive_file", "active_file")
    )
    return sum(int(stat.get(name, "0")) for name in names)
