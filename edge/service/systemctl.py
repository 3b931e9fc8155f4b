"""systemd's own programs. Each call says what went wrong in their words."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from edge.errors import EdgeError, UnavailableError

TIMEOUT_S = 120.0


def booted(root: Path = Path("/")) -> bool:
    """sd_booted(3): systemd is PID 1 here."""
    return (root / "run/systemd/system").is_dir()


def version() -> int | None:
    """245, 249, 255, …"""
    try:
        first = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"systemd (\d+)", first.stdout)
    return int(found[1]) if found else None


def run(command: Sequence[str], hint: str | None = None) -> str:
    """→ stdout. Raises EdgeError with the program's last words."""
    if shutil.which(command[0]) is None:
        raise UnavailableError(f"{command[0]} is not here", "edgellm as a service needs systemd")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EdgeError(f"`{' '.join(command)}` did not end within {TIMEOUT_S:g} s", hint) from error
    if result.returncode:
        words = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise EdgeError(f"`{' '.join(command)}` failed: {words[-1] if words else result.returncode}", hint)
    return result.stdout


def says(*arguments: str) -> str:
    """One word of systemctl's (`is-active`, `is-enabled`), whatever its exit code."""
    try:
        result = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


def active(unit: str) -> bool:
    return says("is-active", unit) in ("active", "activating", "reloading")


def enabled(unit: str) -> bool:
    return says("is-enabled", unit) == "enabled"
