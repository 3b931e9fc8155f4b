"""Compare an installation with what `install` would write now, and judge the operator's own drop-ins."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge.service import layout
from edge.service.unitfile import DROP_IN
from edge.service.wish import UnitSettings


@dataclass(frozen=True, slots=True)
class Difference:
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
_ALLOWS_GPU = re.compile(r"DeviceAllow\s*=\s*(/dev/(nv|dxg)|char-(nv|\*))")


def diff(settings: UnitSettings, root: Path = Path("/")) -> list[Difference]:
    """Compare the installed files with those that these settings would write."""
    wanted = {file.path: file.text for file in layout.files(settings)}
    found = [one for path, text in wanted.items() if (one := _compare(root / path, text)) is not None]
    found += [Difference(root / p, "stale") for p in layout.all_paths() if p not in wanted and (root / p).exists()]
    return [*found, *_own_drop_ins(root)]


def _own_drop_ins(root: Path) -> Iterator[Difference]:
    """Yield the operator's drop-ins, with the settings that keep a GPU from working (FC-76)."""
    for unit in layout.UNITS:
        for path in sorted((root / layout.UNIT_DIR / f"{unit}.d").glob("*.conf")):
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
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
