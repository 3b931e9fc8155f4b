"""The device nodes that CUDA opens on this kind of board, and whether the serving user reaches them."""

from __future__ import annotations

import re

from edge.board import nvidia
from edge.board.board import Board
from edge.board.tree import Tree
from edge.doctor.facts import Devices, Jtop, Node
from edge.doctor.gather.accounts import Account, group_ids, group_of

_GROUPS = ("video", "render", "jtop")
_JTOP_SOCKET = "/run/jtop.sock"


def read(tree: Tree, board: Board, account: Account) -> Devices:
    names = group_ids(tree)
    igpu = "/dev/nvgpu/igpu0"
    return Devices(
        user=account.name,
        user_groups=account.groups,
        nodes=tuple(
            # In a copied tree the nodes are plain files: that they are there is all they tell.
            Node(path, group_of(tree.path(path), names), not tree.live or account.reaches(tree.path(path), 6))
            for path in wanted_nodes(tree, board)
            if tree.exists(path)
        ),
        pending_groups=tuple(name for name in account.pending if name in _GROUPS),
        igpu_folder=tuple(tree.children(igpu)) if tree.exists(igpu) else None,
        persistence=_persistence(tree) if board.gpus and board.soc is None else None,
    )


def _persistence(tree: Tree) -> bool | None:
    told = [reading.persistence for reading in nvidia.read(tree).gpus]
    return all(told) if told and None not in told else None


def wanted_nodes(tree: Tree, board: Board) -> tuple[str, ...]:
    """Every node that may matter here; which of them must be there is the check's business."""
    if board.container == "wsl2":
        return ("/dev/dxg",)
    cards = tuple(f"/dev/{name}" for name in tree.children("/dev") if re.fullmatch(r"nvidia\d+", name))
    nvidia = (*cards, "/dev/nvidiactl", "/dev/nvidia-uvm")
    if not board.unified_memory or board.soc is None:
        return nvidia
    render = tuple(f"/dev/dri/{name}" for name in tree.children("/dev/dri") if name.startswith("renderD"))
    tegra = ("/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/nvhost-gpu", "/dev/nvhost-as-gpu", "/dev/nvgpu/igpu0/ctrl")
    return (*tegra, *render, *(nvidia if board.soc == "Thor" else ()))


def jtop(tree: Tree, account: Account) -> Jtop:
    """jetson-stats' socket: absent, a socket, or the folder that a container mount made before the service ran."""
    path = tree.path(_JTOP_SOCKET)
    try:
        kind = "socket" if path.is_socket() else "folder" if path.is_dir() else "file" if path.exists() else "absent"
    except OSError:
        kind = "absent"
    reachable = kind == "socket" and account.reaches(path, 6)
    return Jtop(kind, reachable, group_of(path, group_ids(tree)) if kind != "absent" else None)
