"""Checks of the GPU (device nodes, groups, driver, memory), and how their facts are read."""

from __future__ import annotations

from edge.board import nvidia
from edge.board.board import Board
from edge.board.device_nodes import gpu_nodes
from edge.board.tables import board_reference
from edge.doctor.accounts import Account, group_ids, group_of, reaches
from edge.doctor.check import Finding, bad, ok, unknown, warn
from edge.doctor.facts import Devices, DoctorFacts, Jtop, Node
from edge.linux.tree import Tree
from edge.units import format_bytes

# Below half of its memory free, another process holds a model or a desktop uses the card.
_FREE_SHARE = 0.5


def nodes(facts: DoctorFacts) -> Finding | None:
    """Check that the device nodes that CUDA needs on this board exist."""
    board, needed, found = facts.board, facts.devices.needed, {node.path for node in facts.devices.nodes}
    if board.container == "wsl2" or not board.gpus:
        return None
    # On JetPack 6 the driver fills this folder with control nodes once the GPU's firmware runs.
    if facts.devices.igpu_folder == ("power",):
        says = "the GPU did not start at boot: /dev/nvgpu/igpu0 holds only `power`"
        return bad(says, "switch the board off and on again (a reboot is not enough); then update its firmware")
    missing = [] if found & set(needed.one_of) else [" or ".join(needed.one_of)]
    missing += [path for path in needed.all_of if path not in found]
    if not missing:
        return ok(f"{len(found)} device nodes exist")
    if board.container:
        step = "start the container with the NVIDIA runtime"
        return bad(f"{', '.join(missing)} is not in this container", step, "docker run --runtime nvidia …")
    says = f"{', '.join(missing)} is missing: the driver is not loaded"
    return bad(says, "see the kernel's log", "sudo dmesg | grep -iE 'nvgpu|nvrm|nvidia'")


def access(facts: DoctorFacts) -> Finding | None:
    """Check that the serving user may open the nodes; outside group video NvRmMemInitNvmap is denied."""
    if not facts.live or not facts.devices.nodes:
        return None
    closed = [node for node in facts.devices.nodes if not node.reachable]
    user = facts.devices.user
    if not closed:
        return ok(f"{user} may open them")
    groups = sorted({node.group for node in closed if node.group and node.group != "root"})
    says = f"{user} may not open {', '.join(node.path for node in closed[:3])}"
    # Groups are set at login: usermod changes no session that is open.
    if set(groups) & set(facts.devices.pending_groups):
        return bad(f"{says} yet: the group was added after this login", "log in again, or reboot")
    wanted = ",".join(groups) or "video,render"
    return bad(says, f"add {user} to {wanted}", f"sudo usermod -aG {wanted} {user}")


def unified_virtual_memory(facts: DoctorFacts) -> Finding | None:
    """Check /dev/nvidia-uvm, which CUDA opens first; nvidia-modprobe creates it, maybe after a boot service started."""
    if facts.board.soc is not None or not facts.board.gpus or facts.board.container == "wsl2":
        return None
    if any(node.path == "/dev/nvidia-uvm" for node in facts.devices.nodes):
        return ok("/dev/nvidia-uvm exists")
    step = "CUDA cannot start without it; load it at boot as well (/etc/modules-load.d)"
    return bad("/dev/nvidia-uvm is missing", step, "sudo nvidia-modprobe -u -c=0")


def persistence(facts: DoctorFacts) -> Finding | None:
    """Check persistence mode: without it the driver unloads with the last process, and each start pays seconds."""
    if facts.board.soc is not None or not facts.board.gpus or facts.board.container == "wsl2":
        return None
    if facts.devices.persistence:
        return ok("the driver keeps the GPU ready between programs")
    # The daemon runs on the host, whose units a container does not see.
    if facts.board.container is not None:
        return unknown("whether the host keeps the GPU ready cannot be read in a container")
    unit = facts.units.get("nvidia-persistenced.service")
    if unit is None:
        return unknown("systemctl does not report nvidia-persistenced")
    if unit.active == "active":
        return ok("nvidia-persistenced keeps the GPU ready")
    step = "start it at boot: the first CUDA call of each start is seconds slower without it"
    return warn("nvidia-persistenced does not run", step, "sudo systemctl enable --now nvidia-persistenced")


def mig(facts: DoctorFacts) -> Finding | None:
    """Warn of GPUs that are split by MIG."""
    split = [gpu.name for gpu in facts.board.gpus if gpu.mig]
    if not split:
        return None
    step = "plan for the instance's memory with --memory, or switch MIG off"
    return warn(f"{', '.join(split)} is split by MIG: an instance has only part of its memory", step)


def driver(facts: DoctorFacts) -> Finding | None:
    """Check the driver against the oldest branch of each CUDA major; minor versions are compatible."""
    board = facts.board
    if board.soc is not None or not board.gpus:
        return None
    if board.driver is None:
        return unknown("the driver's version cannot be read")
    branch = int(board.driver.split(".")[0])
    rows = board_reference().drivers
    newest = next((row for row in rows if branch >= int(row.oldest)), None)
    if newest is None:
        says = f"driver {board.driver} is older than any CUDA that llama.cpp builds with"
        return bad(says, f"install driver {rows[0].oldest} or newer ({rows[0].source})")
    return ok(f"driver {board.driver} serves CUDA {newest.cuda} and older")


def memory(facts: DoctorFacts) -> Finding | None:
    """Warn where other processes hold most of a discrete GPU's memory."""
    snapshot = facts.memory
    cards = [(gpu.name, gpu.uuid) for gpu in facts.board.gpus if gpu.uuid in snapshot.total_bytes]
    if not cards:
        return None
    free = {uuid: snapshot.available_bytes[uuid] / snapshot.total_bytes[uuid] for _, uuid in cards if uuid}
    says = ", ".join(f"{name}: {format_bytes(snapshot.available_bytes[uuid])} free" for name, uuid in cards if uuid)
    if min(free.values()) < _FREE_SHARE:
        return warn(says, "see which process holds the rest", "nvidia-smi")
    return ok(says)


CHECKS = {
    "gpu.nodes": nodes,
    "gpu.access": access,
    "gpu.uvm": unified_virtual_memory,
    "gpu.persistence": persistence,
    "gpu.memory": memory,
    "gpu.mig": mig,
    "gpu.driver": driver,
}


# Read the device nodes that CUDA opens, and whether the serving user may open them.

_GROUPS = ("video", "render", "jtop")  # of the udev rules of L4T and of jetson-stats
_JTOP_SOCKET = "/run/jtop.sock"  # jetson-stats 4 and later


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
