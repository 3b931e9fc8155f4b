"""Find the Python that runs the jtop service: client and service must come from the same installation (FC-65)."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import sys
from pathlib import Path

_UNITS = ("etc/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
_EXEC = re.compile(r"^ExecStart=[-@:+!]*(\S+)", re.MULTILINE)


def find(root: Path = Path("/")) -> Path | None:
    """Return the running service's interpreter, else its unit's, else ours if jetson-stats is installed in it."""
    for candidate in (_of_process(root), _of_unit(root)):
        if candidate is not None and trusted(candidate):
            return candidate
    return Path(sys.executable) if importlib.util.find_spec("jtop") else None


def trusted(path: Path) -> bool:
    """Return whether only root or this user can change what the path runs: each folder, the file, its link's target.

    Any user can start a process named jtop; without this check its program would run as ours.
    """
    return all(_safe(part) for end in (path, path.resolve()) for part in (end, *end.parents))


def _safe(path: Path) -> bool:
    try:
        state = path.lstat()
    except OSError:
        return False
    if state.st_uid not in (0, os.geteuid()):
        return False
    others = stat.S_IWOTH | (stat.S_IWGRP if state.st_gid != 0 else 0)
    # In a sticky folder (/tmp) others can add names but not replace ours. A link's own mode means nothing.
    return bool(stat.S_ISLNK(state.st_mode) or state.st_mode & stat.S_ISVTX or not state.st_mode & others)


def _of_process(root: Path) -> Path | None:
    """Return the interpreter of a process `PYTHON …/jtop --force` of root or of this user."""
    for process in sorted((root / "proc").glob("[0-9]*")):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            owner = process.stat().st_uid
        except OSError:
            continue
        ours = owner in (0, os.geteuid())
        if ours and b"--force" in words and len(words) > 2 and words[1].rpartition(b"/")[2] == b"jtop":
            return _python(os.fsdecode(words[0]))
    return None


def _of_unit(root: Path) -> Path | None:
    """Return the shebang's interpreter of the program that jtop.service starts."""
    for folder in _UNITS:
        try:
            program = _EXEC.search((root / folder / "jtop.service").read_text())
            first = (root / program[1].lstrip("/")).read_bytes().split(b"\n", 1)[0] if program else b""
        except (OSError, UnicodeDecodeError):
            continue
        if first.startswith(b"#!"):
            return _python(os.fsdecode(first[2:].strip()).split(" ")[0])
    return None


def _python(word: str) -> Path | None:
    path = Path(word)
    return path if path.is_absolute() and path.name.startswith("python") else None
