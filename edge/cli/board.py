"""`edgellm board`: module, memory, drivers and GPUs of a machine."""

from __future__ import annotations

import typer

from edge.cli.options import BoardId, Json, Memory, RootDir, print_json


def register(root: typer.Typer) -> None:
    root.command(epilog="Example: edgellm board --root tests/trees/orin-nano-8")(board)


def board(board_id: BoardId = None, root_dir: RootDir = None, memory: Memory = None, as_json: Json = False) -> None:
    """Show module, chip, memory, JetPack, CUDA, power mode and GPUs."""
    from edge.board.document import document
    from edge.board.here import board_and_memory
    from edge.units import parse_size

    found, reading = board_and_memory(board_id, root_dir, parse_size(memory) if memory else None)
    if as_json:
        print_json(document(found, reading))
        return
    from edge.render.board import show

    show(found, reading)
