"""Find the device nodes that CUDA opens on each kind of board, and check that this user may open them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from edge.board.board import Board
from edge.linux.tree import Tree

# Any one of these is the integrated GPU: JetPack 4 and 5, JetPack 6, Thor.
TEGRA_GPU = ("/dev/nvhost-ctrl-gpu", "/dev/nvgpu/igpu0/ctrl", "/dev/nvidia0")
# Opened by CUDA on Tegra as well, but absent on some releases.
_TEGRA_MORE = ("/dev/nvmap", "/dev/nvhost-gpu", "/dev/nvhost-as-gpu")
_TEGRA_MEMORY = "/dev/nvmap"  # the allocator of Tegra: without it NvRmMemInitNvmap fails
_CONTROL = "/dev/nvidiactl"  # opened by every CUDA program, whichever cards it uses
_UNIFIED_MEMORY = "/dev/nvidia-uvm"  # made by nvidia-modprobe, which may not have run at boot
_WSL = "/dev/dxg"  # the only node of a GPU in WSL2

# Their owners on JetPack and on Debian: /dev/nvhost-* and /dev/nvidia* belong to video, /dev/dri/renderD* to render.
GPU_GROUPS = ("video", "render")

WAIT_S = 60.0  # Tegra's nodes appear within seconds of boot (FC-74: 8 s on an Orin); a minute is generous
WAIT_LATER_S = 5.0  # the driver of a machine that booted long ago is loaded or will not be
YOUNG_S = 300.0  # since boot: later no driver is merely late
_NVIDIA = "0x10de"  # PCI vendor id
_DISPLAY_CLASS = "0x03"  # PCI base class: VGA and 3D controllers, not NVIDIA's audio and USB functions


class GpuNodes(NamedTuple):
    """Device nodes of a board's GPU: one of `one_of` and all of `all_of` must open; `more` exist on some releases."""

    one_of: tuple[str, ...]
    all_of: tuple[str, ...]
    more: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name once, needed ones first."""
        return tuple(dict.fromkeys((*self.one_of, *self.all_of, *self.more)))


class NodeCheck(Struct, frozen=True):
    """Whether a GPU's nodes open. `evidence` is for the gate; `sentence` and `hint` are for people if not ready."""

    ready: bool
    evidence: str
    sentence: str = ""
    hint: str = ""


def gpu_nodes(board: Board, tree: Tree) -> GpuNodes:
    """Return the nodes that this board's GPU needs. The cards of a PC are those in /dev."""
    if board.container == "wsl2":
        return GpuNodes((_WSL,), (_WSL,))
    cards = tuple(f"/dev/{name}" for name in tree.children("/dev") if _is_card(name))
    discrete = GpuNodes(cards or ("/dev/nvidia0",), (_CONTROL,), (_UNIFIED_MEMORY,))
    if not board.unified_memory or board.soc is None:
        return discrete
    render = tuple(f"/dev/dri/{name}" for name in tree.children("/dev/dri") if name.startswith("renderD"))
    # Thor's driver is the one of discrete GPUs: its memory is not behind nvmap.
    if board.soc == "Thor":
        return GpuNodes(TEGRA_GPU, (), (*_TEGRA_MORE, *render, *discrete.names))
    return GpuNodes(TEGRA_GPU, (_TEGRA_MEMORY,), (*_TEGRA_MORE, *render))


def present(tree: Tree) -> tuple[str, ...]:
    """Return the nodes of any NVIDIA GPU that exist. A change of this list makes a cached device list stale."""
    return tuple(node for node in (*TEGRA_GPU, _TEGRA_MEMORY, _WSL) if tree.exists(node))


def check_nodes(board: Board, root: Path = Path("/")) -> NodeCheck:
    """Open the nodes of this board's GPU as this user."""
    tree = Tree(root)
    nodes = gpu_nodes(board, tree)
    found = _judge(tree, nodes)
    if not found.ready or nodes.all_of != (_CONTROL,):
        return found
    listed = f"; the driver lists {', '.join(gpu.name for gpu in board.gpus)}" if board.gpus else ""
    return NodeCheck(True, f"{_CONTROL} opens{listed}")


def wait_limit_s(root: Path = Path("/")) -> float:
    """Return for how long a missing node may still appear: a minute soon after boot, else seconds."""
    try:
        up_s = float((root / "proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return WAIT_S
    return WAIT_S if up_s < YOUNG_S else WAIT_LATER_S


def driver_pending(board: Board, root: Path = Path("/")) -> bool:
    """Return whether a discrete GPU is on the bus whose driver does not answer yet, soon after boot."""
    if board.gpus or board.unified_memory or wait_limit_s(root) < WAIT_S:
        return False
    return nvidia_on_pci(root)


def nvidia_on_pci(root: Path = Path("/")) -> bool:
    """Return whether an NVIDIA GPU is on the PCI bus, usable or not."""
    tree = Tree(root)
    devices = "/sys/bus/pci/devices"
    return any(
        tree.word(f"{devices}/{name}/vendor") == _NVIDIA
        and (tree.word(f"{devices}/{name}/class") or "").startswith(_DISPLAY_CLASS)
        for name in tree.children(devices)
    )


def _is_card(name: str) -> bool:
    return name.startswith("nvidia") and name.removeprefix("nvidia").isdecimal()


def _judge(tree: Tree, nodes: GpuNodes) -> NodeCheck:
    needed = (*nodes.one_of, *nodes.all_of)
    faults = {name: _open_error(tree, name) for name in needed}
    usable = [name for name in nodes.one_of if faults[name] is None]
    closed = [name for name in needed if faults[name] in (errno.EACCES, errno.EPERM)]
    lacking = [name for name in nodes.all_of if faults[name] is not None]
    if usable and not lacking:
        return NodeCheck(True, f"{usable[0]} {'may be opened' if _only_permitted(usable[0]) else 'opens'}")
    if closed:
        hint = "add this user to the groups video and render, then log in again; a service needs them in its unit"
        return NodeCheck(False, f"{closed[0]} is closed", f"this user may not open {closed[0]}", hint)
    missing = lacking[0] if lacking else nodes.one_of[0]
    hint = "the driver may be late (at boot), not loaded (`lsmod`), or hidden from this container or service"
    return NodeCheck(False, f"{missing} is missing", f"the GPU's device node {missing} is not there", hint)


def _only_permitted(name: str) -> bool:
    """Return whether only the permissions are checked: opening a GPU without persistence initializes it for seconds."""
    return _is_card(name.removeprefix("/dev/"))


def _open_error(tree: Tree, name: str) -> int | None:
    """Return the errno of opening a node; None when it opens."""
    path = tree.path(name)
    if _only_permitted(name):
        if os.access(path, os.R_OK | os.W_OK):
            return None
        return errno.EACCES if path.exists() else errno.ENOENT
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno or errno.EIO
    return None
