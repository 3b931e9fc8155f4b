"""Get what a start lacks, with the operator's consent, by running `edgellm build` and `edgellm model pull`.

As processes of their own they show their progress and import what they need; the process of `up` stays small.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from edge.errors import EdgeError, EngineMissingError
from edge.plan.candidates import DownloadCandidate
from edge.plan.choose import fetch_first
from edge.units import format_bytes


def fetch(absent: dict[str, DownloadCandidate], state_dir: Path | None, *, yes: bool) -> None:
    """Pull the models that the plan chose. Raises ModelMissingError without consent, EdgeError if a pull fails."""
    wanted = ", ".join(f"{offer.id} ({format_bytes(offer.bytes)})" for offer in absent.values())
    if not (yes or _agrees(f"fetch {wanted}?")):
        raise fetch_first(absent)
    print(f"fetching {wanted}", flush=True)
    for offer in absent.values():
        _run(["model", "pull", offer.source or offer.id], state_dir)


def build(missing: EngineMissingError, recipe: str, state_dir: Path | None, *, yes: bool) -> None:
    """Build the engine that the plan needs. Raises `missing` without consent, EdgeError if the build fails."""
    if not (yes or _agrees(f"{missing}. Build it now? {missing.hint}")):
        raise missing
    print(f"{missing}: building it. {missing.hint}", flush=True)
    _run(["build", "-p", recipe], state_dir)


def _agrees(question: str) -> bool:
    """Ask on the terminal; without one the answer is no."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _run(arguments: Sequence[str], state_dir: Path | None) -> None:
    place = ["--state-dir", str(state_dir)] if state_dir else []
    code = subprocess.run([sys.executable, "-m", "edge", *arguments, *place], check=False).returncode
    if code:
        raise EdgeError(f"`edgellm {' '.join(arguments)}` failed with exit code {code}", "see the message above")
