"""systemd units, by one `systemctl show`, and the text of our unit with its drop-ins."""

from __future__ import annotations

import subprocess
from pathlib import Path

from edge.board.tree import Tree
from edge.doctor.facts import DropIn, Unit

OURS = ("edgellm.service", "edgellm.socket")
WATCHED = (
    *OURS,
    "jtop.service",
    "nvidia-persistenced.service",
    "nvpmodel.service",
    "nvzramconfig.service",
    "nvargus-daemon.service",
    "docker.service",
)
_PROPERTIES = "Id,LoadState,ActiveState,UnitFileState,Result,NRestarts"
_TIMEOUT_S = 3.0
_UNIT_FOLDERS = (
    "/run/systemd/system",
    "/etc/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)


def running(tree: Tree) -> bool:
    """Whether systemd is PID 1 here."""
    return tree.exists("/run/systemd/system")


def read(tree: Tree, systemctl: str = "systemctl") -> dict[str, Unit]:
    """Empty where systemd does not run or does not answer in 3 s."""
    if not tree.live or not running(tree):
        return {}
    command = [systemctl, "show", f"--property={_PROPERTIES}", *WATCHED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse(done.stdout)


def parse(text: str) -> dict[str, Unit]:
    """Blocks of KEY=VALUE lines with empty lines between."""
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


def our_text(tree: Tree) -> str:
    """Our installed unit with its drop-ins, as one text; empty when it is not installed."""
    return "\n".join(drop_in.text for drop_in in our_files(tree))


def our_files(tree: Tree) -> tuple[DropIn, ...]:
    """The unit file first, then /etc's and /run's drop-ins."""
    unit = next((path for folder in _UNIT_FOLDERS if tree.exists(path := f"{folder}/edgellm.service")), None)
    paths = [unit] if unit else []
    for folder in _UNIT_FOLDERS:
        names = tree.children(f"{folder}/edgellm.service.d")
        paths += [f"{folder}/edgellm.service.d/{name}" for name in names if Path(name).suffix == ".conf"]
    return tuple(DropIn(path, tree.text(path) or "") for path in paths)
