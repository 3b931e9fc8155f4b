"""Read systemd units with one `systemctl show`, and the text of edgellm.service with its drop-ins."""

from __future__ import annotations

import subprocess
from pathlib import Path

from edge.board.tree import Tree
from edge.doctor.facts import DropIn, Unit
from edge.service.systemctl import booted

OURS = ("edgellm.service", "edgellm.socket")
WATCHED = (*OURS, "jtop.service", "nvidia-persistenced.service")
_PROPERTIES = "Id,LoadState,ActiveState,UnitFileState,Result,NRestarts"
_TIMEOUT_S = 3.0
_UNIT_FOLDERS = (
    "/run/systemd/system",
    "/etc/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)


def read_units(tree: Tree, systemctl: str = "systemctl") -> dict[str, Unit]:
    """Return the watched units by name; empty where systemd does not run or answer within 3 s."""
    if not tree.live or not booted(tree.root):
        return {}
    command = [systemctl, "show", f"--property={_PROPERTIES}", *WATCHED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_show(done.stdout)


def parse_show(text: str) -> dict[str, Unit]:
    """Parse blocks of KEY=VALUE lines that are separated by empty lines."""
    units = {}
    for block in text.split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" not in fields:
            continue
        restarts = fields.get("NRestarts", "0")
        units[fields["Id"]] = Unit(
            name=fields["Id"],
            load=fields.get("LoadState", ""),
            active=fields.get("ActiveState", ""),
            file_state=fields.get("UnitFileState", ""),
            result=fields.get("Result", ""),
            restarts=int(restarts) if restarts.isdecimal() else 0,
        )
    return units


def unit_files(tree: Tree) -> tuple[DropIn, ...]:
    """Return edgellm.service and its drop-ins in the order of systemd's folders; empty where it is not installed."""
    unit = next((path for folder in _UNIT_FOLDERS if tree.exists(path := f"{folder}/edgellm.service")), None)
    paths = [unit] if unit else []
    for folder in _UNIT_FOLDERS:
        names = tree.children(f"{folder}/edgellm.service.d")
        paths += [f"{folder}/edgellm.service.d/{name}" for name in names if Path(name).suffix == ".conf"]
    return tuple(DropIn(path, tree.text(path) or "") for path in paths)
