"""Checks of edgellm's own folders, modes and sockets, which `--fix` repairs. Pure."""

from __future__ import annotations

from edge.doctor.check import Check, ok, warn
from edge.doctor.facts import Facts, OwnFile

_FIX = "edgellm doctor --fix"


def files(facts: Facts) -> tuple[Check, ...]:
    """Report what `--fix` would change."""
    if not facts.live:
        return ()
    if not facts.leftovers:
        return (ok("files.ours", "folders exist, modes are right, no stale socket"),)
    missing = [str(file.path) for file in facts.leftovers if file.kind == "folder"]
    found = [_one(file) for file in facts.leftovers if file.kind != "folder"]
    if missing:
        found.append(ok("files.folders", f"created at the first start, or now with --fix: {', '.join(missing)}"))
    return tuple(found)


def _one(file: OwnFile) -> Check:
    if file.kind == "mode":
        return warn("files.mode", f"{file.path} is open to others", f"its mode should be {file.mode:o}", _FIX)
    return warn("files.socket", f"{file.path} belongs to a process that has ended", "the next start removes it", _FIX)


CHECKS = (files,)
