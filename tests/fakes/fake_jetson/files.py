"""Writing a tree of small files."""

from __future__ import annotations

import os
from pathlib import Path


def put(path: Path, value: object) -> None:
    """In place, so that bind mounts and open files keep seeing it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(value if isinstance(value, bytes) else f"{value}\n".encode())


def link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(path):
        path.symlink_to(os.path.relpath(target, path.parent) if isinstance(target, Path) else target)
