"""Small things done to files as root: whole or not at all, with an owner."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from edge.linux.files import write_atomic


def put(path: Path, text: str, mode: int = 0o644) -> None:
    """Makes the folder (0755) where it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    write_atomic(path, text, mode)


def same_text(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def user_exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def belongs_to(path: Path, user: str) -> bool:
    try:
        return path.stat().st_uid == pwd.getpwnam(user).pw_uid
    except (OSError, KeyError):
        return False


def give(path: Path, user: str) -> None:
    entry = pwd.getpwnam(user)
    os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
