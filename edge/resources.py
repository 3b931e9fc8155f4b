"""Find the data folders `build/`, `profiles/`, `systemd/`, beside the package or inside it; run a module of Python."""

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


def module_command(module: str, python: str = sys.executable) -> list[str]:
    """Return `python -m module` that imports nothing from the current folder, which may be /tmp with files of others.

    `-P` exists since Python 3.11; `-I` would ignore PYTHONPATH and the user's own packages, where pip may be.
    """
    start = f"import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_module({module!r}, None, "
    return [python, "-c", start + "'__main__', True)"]


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises OSError, or ValueError for bad TOML, bad UTF-8, a file too large or nested too deep."""
    try:
        values: dict[str, Any] = tomllib.loads(read_bounded(path).decode("utf-8-sig"))  # editors on Windows write a BOM
    except RecursionError:
        raise ValueError(f"{path} is nested too deep") from None
    return values
