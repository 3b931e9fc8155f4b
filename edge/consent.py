"""What a start lacks, got with the user's word: `edgellm build` and `edgellm model pull`, run as commands of their own.

They show their own progress and import what they like; the process of `up` stays lean.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from edge.errors import EdgeError, EngineMissingError
from edge.plan.chosen import fetch_first
from edge.plan.offer import Offer
from edge.units import format_bytes


def fetch(absent: dict[str, Offer], state_dir: Path | None, *, yes: bool) -> None:
    """Pulls what the plan chose. Raises ModelMissingError without consent, EdgeError when a pull fails."""
    wanted = ", ".join(f"{offer.id} ({format_bytes(offer.bytes)})" for offer in absent.values())
    if not (yes or _agrees(f"fetch {wanted}?")):
        raise fetch_first(absent)
    print(f"fetching {wanted}", flush=True)
    for offer in absent.values():
        _run(["model", "pull", offer.source or offer.id], state_dir)


def build(missing: EngineMissingError, recipe: str, state_dir: Path | None, *, yes: bool) -> None:
    """Builds the engine that the plan needs. Raises the given error without consent, EdgeError when it fails."""
    if not (yes or _agrees(f"{missing}. Build it now? {missing.hint}")):
        raise missing
    print(f"{missing}: building it. {missing.hint}", flush=True)
    _run(["build", "-p", recipe], state_dir)


def _agrees(question: str) -> bool:
    """Only a person at a terminal can agree."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _run(arguments: Sequence[str], state_dir: Path | None) -> None:
    where = ["--state-dir", str(state_dir)] if state_dir else []
    command = [sys.executable, "-m", "edge", *arguments, *where]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise EdgeError(f"`edgellm {' '.join(arguments)}` failed with exit code {code}", "its own message says why")
