"""Run systemd's programs; errors carry their last line of output."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from edge.errors import EdgeError, UnavailableError

TIMEOUT_S = 120.0  # twice TimeoutStopSec= of edgellm.service


def booted(root: Path = Path("/")) -> bool:
    """Return whether systemd is PID 1, as sd_booted(3) does."""
    return (root / "run/systemd/system").is_dir()


def run(command: Sequence[str], hint: str | None = None) -> str:
    """Run a program and return its stdout. Raises EdgeError with its last line of output."""
    if shutil.which(command[0]) is None:
        raise UnavailableError(f"{command[0]} is not installed", "edgellm as a service needs systemd")
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise EdgeError(f"`{' '.join(command)}` did not end within {TIMEOUT_S:g} s", hint) from error
    if result.returncode:
        output = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise EdgeError(f"`{' '.join(command)}` failed: {output[-1] if output else result.returncode}", hint)
    return result.stdout


def query(*arguments: str) -> str:
    """Return the word that systemctl prints (`is-active`, `is-enabled`), ignoring its exit code; else `unknown`."""
    try:
        result = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.strip() or "unknown"


def active(unit: str) -> bool:
    """Return whether the unit runs or is starting."""
    # `activating` counts: Type=notify stays in it for the whole load of a model.
    return query("is-active", unit) in ("active", "activating", "reloading")


def enabled(unit: str) -> bool:
    """Return whether the unit is enabled at boot."""
    return query("is-enabled", unit) == "enabled"
