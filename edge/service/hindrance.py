"""Find settings in the operator's drop-ins that keep a running service from its GPU (FC-76)."""

from __future__ import annotations

from pathlib import Path

from edge.board import jetson
from edge.board.device_nodes import nvidia_on_pci
from edge.board.tree import Tree
from edge.service.differ import conflicts
from edge.service.unitfile import DROP_IN

# In the order of systemd.unit(5): a file in an earlier folder replaces one of the same name in a later.
FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system")


def drop_in_conflicts(unit: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Return `FILE: PrivateDevices=yes hides …` for each; empty where the machine has no NVIDIA GPU."""
    if not nvidia_on_pci(root) and jetson.read(Tree(root), 0) is None:
        return ()
    return tuple(
        f"/{path.relative_to(root)}: {conflict}"
        for path in _drop_ins(unit, root)
        for conflict in conflicts(_text(path))
    )


def _drop_ins(unit: str, root: Path) -> list[Path]:
    """Return the drop-ins in the order in which systemd applies them."""
    found: dict[str, Path] = {}
    for folder in FOLDERS:
        for path in (root / folder / f"{unit}.d").glob("*.conf"):
            found.setdefault(path.name, path)
    return [found[name] for name in sorted(found) if name != DROP_IN]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
