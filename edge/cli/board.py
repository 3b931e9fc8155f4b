"""`edgellm board`: module, memory, drivers and GPUs of a machine."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from rich.table import Table
from rich.text import Text

from edge.board.board import Board
from edge.board.memory import MemorySnapshot
from edge.cli.options import BoardId, Json, Memory, RootDir, print_json
from edge.cli.output import console
from edge.units import format_bytes


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm board --root tests/trees/orin-nano-8")(board)


def board(board_id: BoardId = None, root_dir: RootDir = None, memory: Memory = None, as_json: Json = False) -> None:
    """Show module, chip, memory, JetPack, CUDA, power mode and GPUs."""
    from edge.board.named import board_and_memory
    from edge.board.probe import document
    from edge.units import parse_size

    found, reading = board_and_memory(board_id, root_dir, parse_size(memory) if memory else None)
    if as_json:
        print_json(document(found, reading))
        return

    show(found, reading)


# Text of `edgellm board`.


def show(board: Board, memory: MemorySnapshot) -> None:
    """Print the board: a table on a terminal, whole lines in a pipe."""
    out = console()
    if not out.is_terminal:
        for name, value in rows(board, memory):
            out.print(Text(f"{name:10}  {value}"), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows(board, memory):
        grid.add_row(name, Text(value))
    out.print(grid)


def rows(board: Board, memory: MemorySnapshot) -> Iterator[tuple[str, str]]:
    """Yield name and value of what is known; unknown things are left out."""
    yield "board", f"{board.module} ({board.id})"
    if board.refused:
        yield "refused", board.refused
    if board.soc:
        yield "chip", f"{board.soc}, compute capability {board.compute_capability}"
    yield "cpu", _cpu(board)
    for domain, total in memory.total_bytes.items():
        available = memory.available_bytes[domain]
        name = "memory" if domain in ("unified", "host") else "gpu memory"
        shared = ", shared by CPU and GPU" if domain == "unified" else ""
        yield name, f"{format_bytes(available)} of {format_bytes(total)} available{shared}"
    for gpu in board.gpus if not board.unified_memory else ():
        yield "gpu", f"{gpu.name}, compute capability {gpu.compute_capability or '?'}, {gpu.uuid or 'no UUID'}"
    yield from _system(board)
    for note in (*board.notes, *memory.notes):
        yield "note", note


def _cpu(board: Board) -> str:
    cpu = board.cpu
    threads = f", {cpu.logical_cores} threads" if cpu.logical_cores != cpu.physical_cores else ""
    usable = f", {cpu.usable_cores} of them usable" if cpu.usable_cores else ""
    return f"{cpu.name}, {cpu.physical_cores} cores{usable}{threads}" + (f" ({' '.join(cpu.isa)})" if cpu.isa else "")


def _system(board: Board) -> Iterator[tuple[str, str]]:
    if board.bandwidth_bytes_s:
        yield "bandwidth", f"{board.bandwidth_bytes_s / 1e9:.1f} GB/s"
    if board.jetpack:
        yield "system", f"JetPack {board.jetpack} (L4T {board.l4t or 'unknown'}), CUDA {board.cuda}"
    elif board.driver:
        yield "system", f"NVIDIA driver {board.driver}" + (f", CUDA {board.cuda}" if board.cuda else "")
    if board.power_mode:
        yield "power mode", f"{board.power_mode.name} (number {board.power_mode.id})"
    if board.container:
        yield "container", board.container
