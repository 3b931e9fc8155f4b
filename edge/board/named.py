"""Build boards by name, for `--board agx-orin-64` on another machine."""

from __future__ import annotations

import difflib
from pathlib import Path

from edge.board.board import Board, Cpu, Gpu, newest_capability
from edge.board.memory import MemorySnapshot, assumed, snapshot
from edge.board.probe import probe
from edge.board.tables import BoardRow, HostFacts, Table, board_reference, table
from edge.errors import UsageError
from edge.units import MIB


def board_ids() -> tuple[str, ...]:
    """Return every name that `board_by_id` accepts, without aliases."""
    return tuple(row.id for row in table().rows) + tuple(machine.id for machine in board_reference().machines)


def board_by_id(id: str) -> Board:
    """Build the board as a stock image shows it. Raises UsageError with the nearest name."""
    known = table()
    wanted = id.strip().lower()
    is_super = wanted.endswith("-super")
    for row in known.rows:
        if wanted.removesuffix("-super") in (row.id, *row.aliases):
            return _jetson(row, known, is_super)
    for machine in board_reference().machines:
        if wanted == machine.id:
            return _machine(machine)
    near = difflib.get_close_matches(wanted, board_ids(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(board_ids())}"
    raise UsageError(f"no board is called {id!r}", hint)


def _jetson(row: BoardRow, known: Table, is_super: bool) -> Board:
    soc = known.socs[row.soc]
    # Super modes of Orin Nano and NX raise the memory clock (JetPack 6.2); a name ends with -super for them.
    bandwidth = (row.super_bandwidth_gb_s if is_super else None) or row.bandwidth_gb_s
    return Board(
        id=row.id,
        module=row.name,
        soc=soc.name,
        compute_capability=soc.compute_capability,
        memory_bytes=row.memory_kb * 1024,
        unified_memory=True,
        cpu=Cpu(row.cpu, row.cores, row.cores),
        gpus=(Gpu(soc.gpu_name, compute_capability=soc.compute_capability),),
        bandwidth_bytes_s=bandwidth * 1e9,
        refused=soc.refused,
        notes=(f"named, not probed: memory {row.memory_trust}, the rest {row.trust} ({row.source})",),
    )


def _machine(machine: HostFacts) -> Board:
    gpus = tuple(
        Gpu(
            name=str(gpu["name"]),
            uuid=f"GPU-{index}",
            index=index,
            # Made up, but distinct: plans name discrete GPUs by UUID, and order them by bus.
            pci_bus_id=f"00000000:{index + 1:02X}:00.0",
            memory_bytes=int(gpu["memory_mib"]) * MIB,
            compute_capability=str(gpu["compute_capability"]),
        )
        for index, gpu in enumerate(machine.gpus)
    )
    return Board(
        id=machine.id,
        module=machine.name,
        soc=None,
        compute_capability=newest_capability(gpus),
        memory_bytes=machine.memory_kb * 1024,
        unified_memory=False,
        cpu=Cpu(machine.machine, machine.cores, machine.cores, machine.isa),
        gpus=gpus,
        cuda=machine.cuda,
        notes=("named, not probed",),
    )


# Choose the board of a command: this machine, one by name (`--board`) or a copied tree (`--root`).


def board_and_memory(
    board_id: str | None, root: Path | None, available_bytes: int | None
) -> tuple[Board, MemorySnapshot]:
    """Return the board and its memory. Raises UsageError for an unknown name, a missing folder, or both options."""
    if board_id is not None and root is not None:
        raise UsageError("--board and --root are two ways to name another board", "give one of them")
    if board_id is not None:
        named = board_by_id(board_id)
        return named, assumed(named, available_bytes)
    place = root or Path("/")
    if not (place / "proc").is_dir():
        raise UsageError(
            f"{place} is no copy of a machine: it has no proc folder",
            "a copy holds its proc, sys, etc, dev and var folders",
        )
    found = probe(place)
    return found, snapshot(place, found, available_bytes)
