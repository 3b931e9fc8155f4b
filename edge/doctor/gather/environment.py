"""Read clock, cache folder and locale of this process, and the Windows side of WSL2."""

from __future__ import annotations

import ctypes
import locale
import sys
import time
from collections.abc import Mapping

from edge import resources
from edge.board.tree import Tree
from edge.doctor.facts import Environment, Wsl
from edge.folders import Folders
from edge.service.disk import creatable

_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # struct timex has 208 bytes on 64-bit Linux


def read_environment(tree: Tree, folders: Folders, env: Mapping[str, str]) -> Environment:
    """Read the clock, locale and folders of this process."""
    return Environment(
        now_s=time.time(),
        newest_file_s=_newest(folders),
        time_synchronised=_synchronised() if tree.live else None,
        cache_writable=creatable(folders.cache),
        locale=env.get("LC_ALL") or env.get("LC_NUMERIC") or env.get("LANG") or "C",
        encoding=locale.getpreferredencoding(False),
        prefix=sys.prefix,
    )


def _newest(folders: Folders) -> float | None:
    """Return the time of the newest installed file: edgellm's own tables and the engines' manifests."""
    files = [resources.data_dir("profiles") / "boards.toml", *folders.engines.glob("*/engine.json")]
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def _synchronised() -> bool | None:
    """Ask the kernel whether its clock is synchronised; None where adjtimex(2) is not available."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _CLOCK_UNSYNCHRONISED


def read_wsl(tree: Tree) -> Wsl:
    """Read WSL's devices and libraries, and `.wslconfig` of the first Windows user below /mnt/c."""
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
