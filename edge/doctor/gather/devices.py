"""Read the device nodes that CUDA opens, and whether the serving user may open them."""

from __future__ import annotations

import re

from edge.board import nvidia
from edge.board.board import Board
from edge.board.tree import Tree
from edge.doctor.facts import Devices, Jtop, Node
from edge.doctor.gather.accounts import Account, group_ids, group_of, reaches

_GROUPS = ("video", "render", "jtop")
_JTOP_SOCKET = "/run/jtop.sock"


def read_devices(tree: Tree, board: Board, account: Account) -> Devices:
    """Read nodes, groups and persistence mode."""
    names = group_ids(tree)
    igpu = "/dev/nvgpu/igpu0"
    return Devices(
        user=account.user.name,
        nodes=tuple(
            # In a copied tree the nodes are plain files without their device's owner and mode.
            Node(path, group_of(tree.path(path), names), not tree.live or reaches(account.user, tree.path(path), 6))
            for path in wanted_nodes(tree, board)
            if tree.exists(path)
        ),
        pending_groups=tuple(name for name in account.pending if name in _GROUPS),
        igpu_folder=tuple(tree.children(igpu)) if tree.exists(igpu) else None,
        persistence=_persistence(tree) if board.gpus and board.soc is None else None,
    )


def _persistence(tree: Tree) -> bool | None:
    modes = [reading.persistence for reading in nvidia.read(tree).gpus]
    return all(modes) if modes and None not in modes else None


def wanted_nodes(tree: Tree, board: Board) -> tuple[str, ...]:
    """Return every node that CUDA may open on this kind of board."""
    if board.container == "wsl2":
        return ("/dev/dxg",)
    cards = tuple(f"/dev/{name}" for name in tree.children("/dev") if re.fullmatch(r"nvidia\d+", name))
    discrete = (*cards, "/dev/nvidiactl", "/dev/nvidia-uvm")
    if not board.unified_memory or board.soc is None:
        return discrete
    render = tuple(f"/dev/dri/{name}" for name in tree.children("/dev/dri") if name.startswith("renderD"))
    tegra = ("/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/nvhost-gpu", "/dev/nvhost-as-gpu", "/dev/nvgpu/igpu0/ctrl")
    return (*tegra, *render, *(discrete if board.soc == "Thor" else ()))


def read_jtop(tree: Tree, account: Account) -> Jtop:
    """Read the state of jetson-stats' socket."""
    path = tree.path(_JTOP_SOCKET)
    try:
        kind = "socket" if path.is_socket() else "folder" if path.is_dir() else "file" if path.exists() else "absent"
    except OSError:
        kind = "absent"
    reachable = kind == "socket" and reaches(account.user, path, 6)
    return Jtop(kind, reachable, group_of(path, group_ids(tree)) if kind != "absent" else None)
