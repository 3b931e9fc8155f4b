"""Diagnose a failed build by signatures in its whole log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# How gcc, nvcc, ninja and cmake start the line of an error.
_FIRST_ERROR = re.compile(r"(?:\berror\b|\bfatal\b|FAILED:|CMake Error)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """A diagnosis. `retry`: None, `half` (the jobs) or `baseline` (CPU architecture). `evidence`: lines of the log."""

    id: str
    sentence: str
    hint: str | None
    retry: str | None
    evidence: tuple[str, ...]


def diagnose(lines: Iterable[str], table: Iterable[Mapping[str, Any]]) -> BuildFailure:
    """Return the first signature of the table that any line matches, with the first error lines as evidence.

    The whole log is read, not its tail: ninja finishes other steps after the one that failed.
    """
    kept = list(lines)
    for entry in table:
        pattern = re.compile(entry["pattern"])
        matching = [line.strip() for line in kept if pattern.search(line)]
        if matching:
            return BuildFailure(
                entry["id"], entry["sentence"], entry.get("hint"), entry.get("retry"), tuple(matching[:3])
            )
    errors = tuple(line.strip() for line in kept if _FIRST_ERROR.search(line))[:3]
    last = tuple(line.strip() for line in kept[-3:])
    return BuildFailure("unknown", "the build failed", "see the whole log", None, errors or last)
