"""Why a service may not see its GPU: settings in drop-ins of the machine's owner, named when it starts (FC-76)."""

from __future__ import annotations

from pathlib import Path

from edge.board import jetson
from edge.board.device_nodes import nvidia_on_pci
from edge.board.tree import Tree
from edge.service.differ import warnings
from edge.service.unitfile import DROP_IN

# As systemd reads them: a file of the same name in an earlier folder stands for it.
FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system")


def hindrances(unit: str, root: Path = Path("/")) -> tuple[str, ...]:
    """`FILE: PrivateDevices=yes hides …` for each; nothing where the machine has no NVIDIA GPU."""
    if not nvidia_on_pci(root) and jetson.read(Tree(root), 0) is None:
        return ()
    return tuple(
        f"/{path.relative_to(root)}: {warning}" for path in _drop_ins(unit, root) for warning in warnings(_text(path))
    )


def _drop_ins(unit: str, root: Path) -> list[Path]:
    """In the order in which they are applied."""
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
