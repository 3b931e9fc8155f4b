"""Read the device nodes that CUDA opens, and whether the serving user may open them."""

from __future__ import annotations

from edge.board import nvidia
from edge.board.board import Board
from edge.board.device_nodes import gpu_nodes
from edge.board.tree import Tree
from edge.doctor.facts import Devices, Jtop, Node
from edge.doctor.gather.accounts import Account, group_ids, group_of, reaches

_GROUPS = ("video", "render", "jtop")
_JTOP_SOCKET = "/run/jtop.sock"


def read_devices(tree: Tree, board: Board, account: Account) -> Devices:
    """Read nodes, groups and persistence mode."""
    names, needed = group_ids(tree), gpu_nodes(board, tree)
    igpu = "/dev/nvgpu/igpu0"
    return Devices(
        user=account.user.name,
        needed=needed,
        nodes=tuple(
            # In a copied tree the nodes are plain files without their device's owner and mode.
            Node(path, group_of(tree.path(path), names), not tree.live or reaches(account.user, tree.path(path), 6))
            for path in needed.names
            if tree.exists(path)
        ),
        pending_groups=tuple(name for name in account.pending if name in _GROUPS),
        igpu_folder=tuple(tree.children(igpu)) if tree.exists(igpu) else None,
        persistence=_persistence(tree) if board.gpus and board.soc is None else None,
    )


def _persistence(tree: Tree) -> bool | None:
    modes = [reading.persistence for reading in nvidia.read(tree).gpus]
    return all(modes) if modes and None not in modes else None


def read_jtop(tree: Tree, account: Account) -> Jtop:
    """Read the state of jetson-stats' socket."""
    path = tree.path(_JTOP_SOCKET)
    try:
        kind = "socket" if path.is_socket() else "folder" if path.is_dir() else "file" if path.exists() else "absent"
    except OSError:
        kind = "absent"
    reachable = kind == "socket" and reaches(account.user, path, 6)
    return Jtop(kind, reachable, group_of(path, group_ids(tree)) if kind != "absent" else None)
