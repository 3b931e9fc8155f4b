"""Why a build failed: signatures searched in its whole log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_FIRST_ERROR = re.compile(r"(?:\berror\b|\bfatal\b|FAILED:|CMake Error)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """`retry` is None, `half` (fewer jobs) or `baseline` (the safe CPU architecture). `evidence`: lines of the log."""

    id: str
    sentence: str
    hint: str | None
    retry: str | None
    evidence: tuple[str, ...]


def diagnose(lines: Iterable[str], table: Iterable[Mapping[str, Any]]) -> BuildFailure:
    """The first signature (in the table's order) that any line matches, with the first error lines as evidence.

    The real error often stands far above the end, so the whole log is read and not its tail (D-11).
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
    return BuildFailure("unknown", "the build failed", "the log has the whole story", None, errors or last)
