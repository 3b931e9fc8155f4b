"""The data folders `build/`, `profiles/`, `systemd/`: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from edge.linux.files import read_bounded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str) -> Path:
    """Return the folder `build`, `profiles` or `systemd`: of the checkout, or in a wheel `edge/_data/`."""
    packed = _PACKAGE / "_data" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises OSError, or ValueError for bad TOML, bad UTF-8, a file too large or nested too deep."""
    try:
        values: dict[str, Any] = tomllib.loads(read_bounded(path).decode("utf-8-sig"))  # editors on Windows write a BOM
    except RecursionError:
        raise ValueError(f"{path} is nested too deep") from None
    return values
