"""The load modes that `edgellm bench load` measured: which was soonest ready for an engine, a disk and a size class."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from edge.paths import Folders
from edge.plan.choices import read_all
from edge.units import GIB

# Upper ends of the size classes: a winner for 1 GB says little about 30 GB, where memory is short.
_CLASSES_GIB = (1, 4, 16, 64)


class LoadChoice(Struct, frozen=True):
    """The winner of one measurement. `mount`: mount point of the disk; `offload`: full | partial | none.

    `prefetch`: it was sooner ready with the file read ahead of the engine. `cold_mode`: sooner than `mode` while less
    than `cold_below` (0…1) of the file is in the page cache; None: `mode` is the soonest then, too.
    """

    board: str
    engine: str
    mount: str
    size_class: int
    offload: str
    mode: str
    seconds: float
    prefetch: bool = False
    cold_mode: str | None = None
    cold_below: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        return self.board, self.engine, self.mount, self.size_class, self.offload


def choices_path(folders: Folders) -> Path:
    return folders.data / "load_modes.json"


def size_class(file_bytes: int) -> int:
    return sum(file_bytes > limit * GIB for limit in _CLASSES_GIB)


def offload_of(n_gpu_layers: int, n_layer: int) -> str:
    """Return full | partial | none. Full includes the output layer, llama.cpp's layer n_layer + 1."""
    return "full" if n_gpu_layers > n_layer else "partial" if n_gpu_layers else "none"


def prefetch_helps(*paths: Path) -> bool:
    """Return whether a measurement in one of these files found that reading ahead of an engine helps."""
    return any(row.prefetch for path in paths for row in read_all(path, LoadChoice))


def choice_for(choices: Iterable[LoadChoice], file: str, file_bytes: int, offload: str) -> LoadChoice | None:
    """Return the choice for a model file on the innermost mount, or None. Never dio for a partial offload."""
    wanted = (size_class(file_bytes), offload)
    path = PurePosixPath(file)
    found = [
        choice
        for choice in choices
        if (choice.size_class, choice.offload) == wanted and PurePosixPath(choice.mount) in path.parents
    ]
    # The longest mount point is the innermost.
    best = max(found, key=lambda choice: len(choice.mount), default=None)
    return None if best is not None and best.mode == "dio" and offload != "full" else best


def chosen_mode(choices: Iterable[LoadChoice], file: str, file_bytes: int, offload: str) -> str | None:
    choice = choice_for(choices, file, file_bytes, offload)
    return choice.mode if choice else None
