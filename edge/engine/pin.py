"""Read the pins of llama.cpp in build/llama.cpp.toml. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from edge.engine.toolkit import numbers
from edge.errors import UsageError


@dataclass(frozen=True, slots=True)
class Pin:
    """A llama.cpp release that is trusted by hash. `pypi` and `git` are its two sources."""

    id: str
    commit: str
    version: str
    build_number: int
    released_s: float  # epoch seconds; a clock before it is wrong
    cuda_min: tuple[int, ...]
    cuda_proven: tuple[int, ...]
    cmake_min: tuple[int, ...]
    gcc_min: int
    pypi: Mapping[str, Any]
    git: Mapping[str, Any]

    @property
    def commit9(self) -> str:
        return self.commit[:9]


def pins(table: Mapping[str, Any]) -> tuple[Pin, ...]:
    """Return all pins, newest first."""
    return tuple(
        Pin(
            id=entry["id"],
            commit=entry["commit"],
            version=entry["version"],
            build_number=entry["build_number"],
            released_s=datetime.fromisoformat(entry["released"]).replace(tzinfo=timezone.utc).timestamp(),
            cuda_min=numbers(entry["cuda_min"]),
            cuda_proven=numbers(entry["cuda_proven"]),
            cmake_min=numbers(entry["cmake_min"]),
            gcc_min=entry["gcc_min"],
            pypi=entry["pypi"],
            git=entry["git"],
        )
        for entry in table["pins"]
    )


def pin_for(table: Mapping[str, Any], cuda: tuple[int, ...] | None) -> Pin:
    """Return the newest pin that this CUDA can build, else the newest; None is a CPU build."""
    known = pins(table)
    return next((pin for pin in known if cuda is None or pin.cuda_min <= cuda), known[0])


@dataclass(frozen=True, slots=True)
class SourceChoice:
    """The option --source: `pypi`, `git`, `git:TAG` or `path:DIR`."""

    type: str  # "pypi" | "git" | "path"
    ref: str | None = None


def parse_source(text: str) -> SourceChoice:
    """Parse --source. Raises UsageError."""
    kind, colon, rest = text.partition(":")
    if kind == "pypi" and not colon:
        return SourceChoice("pypi")
    if kind == "git" and (not colon or rest):
        return SourceChoice("git", rest or None)
    if kind == "path" and rest:
        return SourceChoice("path", rest)
    raise UsageError(f"--source {text}: not a source", "write pypi, git, git:TAG or path:DIR")
