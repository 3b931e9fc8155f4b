"""Load what every start needs of profiles/boards.toml: chips, modules, L4T releases, CPU parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from edge import resources
from edge.errors import BugError


@dataclass(frozen=True, slots=True)
class Soc:
    """A chip. `refused` is the reason why its GPU cannot be used."""

    key: str  # "tegra234"
    name: str
    gpu_name: str
    compute_capability: str
    trust: str
    source: str
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A module. `memory_kb` is MemTotal of a stock image; `trust` is measured, reported or datasheet."""

    id: str
    name: str
    soc: str
    part: tuple[str, ...]
    memory_kb: int
    memory_trust: str
    cpu: str
    cores: int
    bandwidth_gb_s: float
    trust: str
    source: str
    aliases: tuple[str, ...] = ()
    bus_bits: int | None = None
    super_bandwidth_gb_s: float | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """An L4T release with its JetPack and CUDA."""

    version: tuple[int, ...]
    jetpack: str
    cuda: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class Table:
    """The shipped tables."""

    socs: dict[str, Soc]
    rows: tuple[Row, ...]
    releases: tuple[Release, ...]  # oldest first
    cpus: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1)
def table() -> Table:
    """Load the shipped tables once."""
    return load(resources.data_dir("profiles") / "boards.toml")


def load(path: Path) -> Table:
    """Load a file. Raises BugError if it is missing or malformed: it is shipped with the code."""
    try:
        raw = resources.load_toml(path)
        return Table(
            socs={key: Soc(key=key, **value) for key, value in raw["soc"].items()},
            rows=tuple(Row(**as_tuples(value)) for value in raw["board"]),
            releases=tuple(
                sorted(
                    (Release(tuple(map(int, key.split("."))), **value) for key, value in raw["l4t"].items()),
                    key=lambda release: release.version,
                )
            ),
            cpus=dict(raw["cpu"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BugError(f"{path.name} cannot be read: {error}", "reinstall edgellm") from error


def as_tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
