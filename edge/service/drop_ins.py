"""Compare an installation with what `install` would write now, and judge the operator's own drop-ins."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from edge.board import jetson
from edge.board.device_nodes import nvidia_on_pci
from edge.linux.files import read_bounded
from edge.linux.tree import Tree
from edge.service import units
from edge.service.units import DROP_IN, UnitSettings


class Difference(Struct, frozen=True):
    """A file that differs. `kind`: missing, changed, stale, or yours (a drop-in of the operator, which is no fault)."""

    path: Path
    kind: str
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


# Settings that take the GPU away, and how (systemd.exec(5)).
GPU_CONFLICTS = {
    "PrivateDevices": "hides the GPU's device nodes",
    "ProtectClock": "sets a device policy that hides the GPU's device nodes",
    "MemoryDenyWriteExecute": "forbids what CUDA's compiler does",
    "DynamicUser": "takes the data folder away from its owner",
}
_TRUE = {"yes", "true", "on", "1"}  # systemd's parse_boolean() also takes y and t
HOME_HIDDEN = {*_TRUE, "tmpfs"}
# One allowed node opens none of the others, so any of the GPU's shows that the operator thought of it.
_ALLOWS_GPU = re.compile(r"DeviceAllow\s*=\s*(/dev/(nv|dxg)|char-(nv|\*))")


def diff(settings: UnitSettings, root: Path = Path("/")) -> list[Difference]:
    """Compare the installed files with those that these settings would write."""
    wanted = {file.path: file.text for file in units.files(settings)}
    found = [one for path, text in wanted.items() if (one := _compare(root / path, text)) is not None]
    found += [Difference(root / p, "stale") for p in units.all_paths() if p not in wanted and (root / p).exists()]
    return [*found, *_own_drop_ins(root)]


def _own_drop_ins(root: Path) -> Iterator[Difference]:
    """Yield the operator's drop-ins, with the settings that keep a GPU from working (FC-76)."""
    for unit in units.UNITS:
        for path in sorted((root / units.UNIT_DIR / f"{unit}.d").glob("*.conf")):
            if path.name != DROP_IN:
                yield Difference(path, "yours", warnings=tuple(conflicts(_text(path) or "")))


def conflicts(text: str, *, gpu: bool = True) -> Iterator[str]:
    """Yield a sentence for each line of a drop-in that is ignored or, with `gpu`, hides the GPU. Pure."""
    named = any(_ALLOWS_GPU.match(line.strip()) for line in text.splitlines())
    for section, name, value in directives(text):
        if not section:
            yield f"{name}= stands above any [Section] and is ignored"
        elif not gpu:
            continue
        elif name in GPU_CONFLICTS and value.lower() in _TRUE:
            yield f"{name}={value} {GPU_CONFLICTS[name]}"
        elif name == "DevicePolicy" and value in ("closed", "strict") and not named:
            yield f"DevicePolicy={value} hides the GPU's device nodes, unless DeviceAllow= names each of them"
        elif name == "DeviceAllow" and value and not named:
            yield f"DeviceAllow={value} closes every device that is not named, the GPU's too"


def directives(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (section, name, value) of each setting of a unit file; the section is empty above the first header."""
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if equals and not line.startswith(("#", ";")):
            yield section, name, value


def _compare(path: Path, wanted: str) -> Difference | None:
    installed = _text(path)
    if installed is None:
        return Difference(path, "missing")
    if installed == wanted:
        return None
    lines = difflib.unified_diff(installed.splitlines(), wanted.splitlines(), str(path), "edgellm", lineterm="", n=1)
    return Difference(path, "changed", tuple(lines))


def _text(path: Path) -> str | None:
    try:
        return read_bounded(path).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


# Find settings in the operator's drop-ins that keep a running service from its GPU (FC-76).

# In the order of systemd.unit(5): a file in an earlier folder replaces one of the same name in a later.
FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)


def drop_in_conflicts(unit: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Return `FILE: PrivateDevices=yes hides …` for each; empty where the machine has no NVIDIA GPU."""
    tree = Tree(root)
    if not nvidia_on_pci(root) and jetson.read(tree, 0) is None:
        return ()
    own = [path for path in drop_in_paths(unit, tree) if not path.endswith(f"/{DROP_IN}")]
    return tuple(f"{path}: {conflict}" for path in own for conflict in conflicts(tree.text(path) or ""))


def drop_in_paths(unit: str, tree: Tree) -> list[str]:
    """Return the drop-ins of a unit in the order in which systemd applies them."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for name in tree.children(f"{folder}/{unit}.d"):
            if name.endswith(".conf"):
                found.setdefault(name, f"{folder}/{unit}.d/{name}")
    return [found[name] for name in sorted(found)]
