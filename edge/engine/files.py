"""Engine files are readable by everybody, and a rename of them survives a power cut."""

from __future__ import annotations

import os
from pathlib import Path

from edge.files import write_atomic


def write_atomically(path: Path, text: str) -> None:
    """Makes the folder, writes whole or not at all, syncs the folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text, 0o644)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
