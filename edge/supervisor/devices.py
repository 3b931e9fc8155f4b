"""Are this board's GPU device nodes there, and may this user open them? Looked at before an engine is started."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from edge.board.board import Board

# Any one of these is the GPU: their names differ between JetPack 4/5, JetPack 6 and Thor.
_TEGRA = ("dev/nvhost-ctrl-gpu", "dev/nvgpu/igpu0/ctrl", "dev/nvidia0")
_TEGRA_MEMORY = "dev/nvmap"
_CONTROL = "dev/nvidiactl"
_WSL = "dev/dxg"

WAIT_S = 60.0  # Tegra's nodes appear within seconds of boot; a minute is generous
WAIT_LATER_S = 5.0  # on a machine that has been up for long nothing is late any more
YOUNG_S = 300.0
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True, slots=True)
class Look:
    """`evidence` is for the gate; `sentence` and `hint` are for people where it is not ready."""

    ready: bool
    evidence: str
    sentence: str = ""
    hint: str = ""


def look(board: Board, root: Path = Path("/")) -> Look:
    """The nodes that this board's GPU needs, opened as this user."""
    if board.container == "wsl2":
        return _judge(root, (_WSL,), (_WSL,))
    if board.unified_memory and board.soc is not None:
        memory = (_TEGRA_MEMORY,) if board.soc in ("Orin", "Xavier") else ()
        return _judge(root, _TEGRA, memory)
    cards = tuple(f"dev/{path.name}" for path in sorted(root.glob("dev/nvidia[0-9]*")))
    found = _judge(root, cards or ("dev/nvidia0",), (_CONTROL,))
    if not found.ready:
        return found
    listed = f"; the driver lists {', '.join(gpu.name for gpu in board.gpus)}" if board.gpus else ""
    return Look(True, f"/{_CONTROL} opens{listed}")


def patience_s(root: Path = Path("/")) -> float:
    """For how long a missing node may only be late."""
    try:
        up_s = float((root / "proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return WAIT_S
    return WAIT_S if up_s < YOUNG_S else WAIT_LATER_S


def late(board: Board, root: Path = Path("/")) -> bool:
    """A discrete GPU is on the bus and its driver does not answer yet, soon after boot."""
    if board.gpus or board.unified_memory or patience_s(root) < WAIT_S:
        return False
    return on_bus(root)


def on_bus(root: Path = Path("/")) -> bool:
    """An NVIDIA GPU is in this machine, whether or not anybody may use it."""
    try:
        found = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return False
    return any(_word(d / "vendor") == _NVIDIA and _word(d / "class").startswith(_DISPLAY_CLASS) for d in found)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _judge(root: Path, any_of: tuple[str, ...], all_of: tuple[str, ...]) -> Look:
    """`any_of`: one is enough; `all_of`: each is needed."""
    faults = {name: _fault(root, name) for name in (*any_of, *all_of)}
    usable = [name for name in any_of if faults[name] is None]
    closed = [name for name in (*any_of, *all_of) if faults[name] in (errno.EACCES, errno.EPERM)]
    lacking = [name for name in all_of if faults[name] is not None]
    if usable and not lacking:
        return Look(True, f"/{usable[0]} {'may be opened' if _only_permitted(usable[0]) else 'opens'}")
    if closed:
        hint = "add this user to the groups video and render, then log in again; a service needs them in its unit"
        return Look(False, f"/{closed[0]} is closed", f"this user may not open /{closed[0]}", hint)
    missing = lacking[0] if lacking else any_of[0]
    hint = "the driver may be late (at boot), not loaded (`lsmod`), or hidden from this container or service"
    return Look(False, f"/{missing} is missing", f"the GPU's device node /{missing} is not there", hint)


def _only_permitted(name: str) -> bool:
    """Opening it initialises a GPU without persistence, which takes seconds: its permissions must do."""
    return name.startswith("dev/nvidia") and name != _CONTROL


def _fault(root: Path, name: str) -> int | None:
    """errno of opening it; None when it opens."""
    path = root / name
    if _only_permitted(name):
        if os.access(path, os.R_OK | os.W_OK):
            return None
        return errno.EACCES if path.exists() else errno.ENOENT
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno or errno.EIO
    return None
