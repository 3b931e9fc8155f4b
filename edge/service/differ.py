"""What an installation on this machine differs in from what `install` would write now, and who changed it since."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge.service import layout
from edge.service.unitfile import DROP_IN
from edge.service.wish import Wish


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind`: missing | changed | stale | yours (a drop-in of the machine's owner: no fault)."""

    path: Path
    kind: str
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


# A user's drop-in that takes the GPU away, and what it does.
HIDES = {
    "PrivateDevices": "hides the GPU's device nodes",
    "ProtectClock": "sets a device policy that hides the GPU's device nodes",
    "MemoryDenyWriteExecute": "forbids what CUDA's compiler does",
    "DynamicUser": "takes the data folder away from its owner",
}
_TRUE = {"yes", "true", "on", "1"}
_ALLOWS_GPU = re.compile(r"DeviceAllow\s*=\s*(/dev/(nv|dxg)|char-(nv|\*))")


def differences(wish: Wish, root: Path = Path("/")) -> list[Difference]:
    wanted = {file.path: file.text for file in layout.files(wish)}
    found = [one for path, text in wanted.items() if (one := _compare(root / path, text)) is not None]
    found += [Difference(root / p, "stale") for p in layout.all_paths() if p not in wanted and (root / p).exists()]
    return [*found, *yours(root)]


def yours(root: Path = Path("/")) -> Iterator[Difference]:
    """Drop-ins beside ours. They are kept, and looked at for what keeps a GPU from working (FC-76)."""
    for unit in layout.UNITS:
        for path in sorted((root / layout.UNIT_DIR / f"{unit}.d").glob("*.conf")):
            if path.name != DROP_IN:
                yield Difference(path, "yours", warnings=tuple(warnings(_text(path) or "")))


def warnings(text: str) -> Iterator[str]:
    """What in a drop-in does harm or nothing. Pure."""
    section = False
    lines = [line.strip() for line in text.splitlines()]
    named = any(_ALLOWS_GPU.match(line) for line in lines)
    for line in lines:
        if line.startswith("["):
            section = True
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or line.startswith(("#", ";")):
            continue
        if not section:
            yield f"{name}= stands above any [Section] and is ignored"
        elif name in HIDES and value.lower() in _TRUE:
            yield f"{name}={value} {HIDES[name]}"
        elif name == "DevicePolicy" and value in ("closed", "strict") and not named:
            yield f"DevicePolicy={value} hides the GPU's device nodes, unless DeviceAllow= names each of them"
        elif name == "DeviceAllow" and value and not named:
            yield f"DeviceAllow={value} closes every device that is not named, the GPU's too"


def _compare(path: Path, wanted: str) -> Difference | None:
    there = _text(path)
    if there is None:
        return Difference(path, "missing")
    if there == wanted:
        return None
    lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), str(path), "edgellm", lineterm="", n=1)
    return Difference(path, "changed", tuple(lines))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
