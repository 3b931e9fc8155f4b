"""`edgellm board`: what this machine is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli.options import Json


def register(root: typer.Typer) -> None:
    @root.command("board")
    def board(
        board_id: Annotated[str | None, typer.Option("--board", metavar="ID", help="a board by name")] = None,
        root_dir: Annotated[Path | None, typer.Option("--root", metavar="DIR", help="a copied machine")] = None,
        memory: Annotated[str | None, typer.Option(metavar="SIZE", help="memory available there")] = None,
        as_json: Json = False,
    ) -> None:
        """Shows what this machine is: module, chip, memory, JetPack, CUDA, power mode, GPUs.

        Example: edgellm board --root tests/trees/orin-nano-8
        """
        _show(board_id, root_dir, memory, as_json)


def _show(board_id: str | None, root_dir: Path | None, memory: str | None, as_json: bool) -> None:
    import json

    from edge.board.document import document
    from edge.board.here import board_and_memory
    from edge.units import parse_size

    found, reading = board_and_memory(board_id, root_dir, parse_size(memory) if memory else None)
    if as_json:
        print(json.dumps(document(found, reading), indent=2))
        return
    from edge.render.board import show

    show(found, reading)
