"""Clock, cache folder and locale of this process; Windows' side of WSL2."""

from __future__ import annotations

import ctypes
import locale
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from edge import resources
from edge.board.tree import Tree
from edge.doctor.facts import Environment, Wsl
from edge.folders import Folders

_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than any struct timex


def read(tree: Tree, folders: Folders, env: Mapping[str, str]) -> Environment:
    return Environment(
        now_s=time.time(),
        newest_file_s=_newest(folders),
        time_synchronised=_synchronised() if tree.live else None,
        cache_writable=_can_write(folders.cache),
        locale=env.get("LC_ALL") or env.get("LC_NUMERIC") or env.get("LANG") or "C",
        encoding=locale.getpreferredencoding(False),
        prefix=sys.prefix,
    )


def _newest(folders: Folders) -> float | None:
    """The newest of what we installed: our own table and the engines' manifests."""
    files = [resources.data_dir("profiles") / "boards.toml", *folders.engines.glob("*/engine.json")]
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def _synchronised() -> bool | None:
    """What the kernel says about its clock; asking changes nothing."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _CLOCK_UNSYNCHRONISED


def _can_write(folder: Path) -> bool:
    near = next(step for step in (folder, *folder.parents) if step.exists())
    return os.access(near, os.W_OK | os.X_OK)


def wsl(tree: Tree) -> Wsl:
    """`.wslconfig` is in the Windows user's folder, which is only seen through /mnt/c."""
    users = tree.children("/mnt/c/Users")
    texts = (tree.text(f"/mnt/c/Users/{user}/.wslconfig") for user in users)
    text = next((text for text in texts if text is not None), None)
    return Wsl(
        dxg=tree.exists("/dev/dxg"),
        library=tree.exists("/usr/lib/wsl/lib/libcuda.so.1"),
        systemd=tree.exists("/run/systemd/system"),
        settings=None if text is None else _settings(text),
        linux_driver=tree.exists("/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
    )


def _settings(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip().lower(): value.strip() for key, _, value in pairs}
