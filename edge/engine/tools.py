"""Programs that build an engine. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tool:
    """One program. `version` compares as numbers: (3, 25, 1)."""

    path: str
    version: tuple[int, ...]

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class Toolkit:
    """One CUDA toolkit. `archs`: what its nvcc lists, empty if it lists nothing."""

    nvcc: str
    version: tuple[int, ...]
    archs: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class Toolchain:
    """All tools of a machine. Absent is None or an empty tuple."""

    machine: str  # "x86_64", "aarch64"
    cmake: Tool | None = None
    ninja: Tool | None = None
    cc: Tool | None = None
    cxx: tuple[Tool, ...] = ()  # the default first, then g++-14, g++-13, …
    ccache: Tool | None = None
    toolkits: tuple[Toolkit, ...] = ()
