"""Write files as root, and test owners and access."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from edge.linux.files import write_atomic


def write_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file atomically, creating its folder (0755). Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    write_atomic(path, text, mode)


def has_text(path: Path, text: str) -> bool:
    """Return whether the file has exactly this text."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def user_exists(name: str) -> bool:
    """Return whether the user database has this name."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def belongs_to(path: Path, user: str) -> bool:
    """Return whether the file exists and the user owns it."""
    try:
        return path.stat().st_uid == pwd.getpwnam(user).pw_uid
    except (OSError, KeyError):
        return False


def give(path: Path, user: str) -> None:
    """Change the owner to a user and its primary group, without following a link."""
    entry = pwd.getpwnam(user)
    os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)


def creatable(folder: Path) -> bool:
    """Return whether this process may write to the folder, or create it in the nearest one that exists."""
    near = next(step for step in (folder, *folder.parents) if step.exists())
    return near.is_dir() and os.access(near, os.W_OK | os.X_OK)
