"""Finds board trees for tests: `tree("orin-nano-8")` to read, `copy("orin-nano-8", tmp_path)` to change."""

from __future__ import annotations

import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = tuple(sorted(path.parent.name for path in HERE.glob("*/PROVENANCE")))


def tree(name: str) -> Path:
    assert name in NAMES, f"no board tree {name}: {', '.join(NAMES)}"
    return HERE / name


def copy(name: str, into: Path) -> Path:
    """A copy that the test may write to."""
    return Path(shutil.copytree(tree(name), into / name))


def write(root: Path, name: str, text: str | bytes) -> Path:
    """One file of a tree, with its folders."""
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
