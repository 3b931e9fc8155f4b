"""Load the part of profiles/boards.toml that only commands need: named machines, known issues, drivers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from edge import resources
from edge.board.table import as_tuples
from edge.errors import BugError


@dataclass(frozen=True, slots=True)
class Machine:
    """A named machine that is not a Jetson, for plans with `--board`."""

    id: str
    name: str
    machine: str
    memory_kb: int
    cores: int
    isa: tuple[str, ...] = ()
    gpus: tuple[dict[str, Any], ...] = ()
    cuda: str | None = None


@dataclass(frozen=True, slots=True)
class Issue:
    """A known fault of L4T releases, as the doctor reports it."""

    l4t: tuple[str, ...]
    says: str
    next: str
    source: str


@dataclass(frozen=True, slots=True)
class Driver:
    """The oldest driver branch that serves a CUDA major on discrete GPUs."""

    cuda: str
    oldest: str
    source: str


@dataclass(frozen=True, slots=True)
class Lore:
    """Named machines, known issues and drivers of the shipped file."""

    machines: tuple[Machine, ...]
    issues: tuple[Issue, ...]
    drivers: tuple[Driver, ...]  # newest CUDA first


@lru_cache(maxsize=1)
def lore() -> Lore:
    """Load the shipped file once. Raises BugError if it does not have this shape."""
    path = resources.data_dir("profiles") / "boards.toml"
    try:
        raw = resources.load_toml(path)
        return Lore(
            machines=tuple(Machine(**as_tuples(value)) for value in raw["machine"]),
            issues=tuple(Issue(**as_tuples(value)) for value in raw["issue"]),
            drivers=tuple(Driver(**value) for value in raw["driver"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BugError(f"{path.name} cannot be read: {error}", "reinstall edgellm") from error
