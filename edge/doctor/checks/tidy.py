"""Our own folders, modes and sockets: what `--fix` may put right. Pure."""

from __future__ import annotations

from edge.doctor.check import Check, ok, warn
from edge.doctor.facts import Facts, OurFile

_FIX = "edgellm doctor --fix"


def files(facts: Facts) -> tuple[Check, ...]:
    if not facts.live:
        return ()
    if not facts.untidy:
        return (ok("files.ours", "folders are there, modes are right, no stale socket"),)
    missing = [str(file.path) for file in facts.untidy if file.kind == "folder"]
    found = [_one(file) for file in facts.untidy if file.kind != "folder"]
    if missing:
        found.append(ok("files.folders", f"made at the first start, or now with --fix: {', '.join(missing)}"))
    return tuple(found)


def _one(file: OurFile) -> Check:
    if file.kind == "mode":
        return warn("files.mode", f"{file.path} is open to others", f"its mode should be {file.mode:o}", _FIX)
    return warn("files.socket", f"{file.path} is left from a process that is gone", "it goes at the next start", _FIX)


CHECKS = (files,)
