"""Load what every start needs of profiles/boards.toml: chips, modules, L4T releases, CPU parts."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from edge import resources
from edge.errors import BugError


class Soc(Struct, frozen=True):
    """A chip. `refused` is the reason why its GPU cannot be used."""

    key: str  # "tegra234"
    name: str
    gpu_name: str
    compute_capability: str
    trust: str
    source: str
    l4t: tuple[int, ...] = ()  # major versions of L4T that support it
    refused: str | None = None


class BoardRow(Struct, frozen=True):
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


class Release(Struct, frozen=True):
    """An L4T release with its JetPack and CUDA."""

    version: tuple[int, ...]
    jetpack: str
    cuda: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


class Table(Struct, frozen=True):
    """The shipped tables."""

    socs: dict[str, Soc]
    rows: tuple[BoardRow, ...]
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
            socs={key: Soc(key=key, **as_tuples(value)) for key, value in raw["soc"].items()},
            rows=tuple(BoardRow(**as_tuples(value)) for value in raw["board"]),
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


# Load the part of profiles/boards.toml that a start does not need: named machines, known issues, drivers, sensors.


class HostFacts(Struct, frozen=True):
    """A named machine that is not a Jetson, for plans with `--board`."""

    id: str
    name: str
    machine: str
    memory_kb: int
    cores: int
    isa: tuple[str, ...] = ()
    gpus: tuple[dict[str, Any], ...] = ()
    cuda: str | None = None


class KnownIssue(Struct, frozen=True):
    """A known fault of L4T releases, as the doctor reports it."""

    l4t: tuple[str, ...]
    says: str
    next: str
    source: str


class Driver(Struct, frozen=True):
    """The oldest driver branch that serves a CUDA major on discrete GPUs."""

    cuda: str
    oldest: str
    source: str


class Sensors(Struct, frozen=True):
    """What the sensors of some boards mean, see profiles/boards.toml."""

    boards: tuple[str, ...] = ()
    total: tuple[tuple[str, ...], ...] = ()
    zones: tuple[str, ...] = ()
    five_volt: str | None = None
    source: str = ""


class BoardReference(Struct, frozen=True):
    """Named machines, known issues, drivers and sensors of the shipped file."""

    machines: tuple[HostFacts, ...]
    issues: tuple[KnownIssue, ...]
    drivers: tuple[Driver, ...]  # newest CUDA first
    sensors: tuple[Sensors, ...]


def _sensors(raw: dict[str, Any]) -> Sensors:
    total = tuple(tuple(names) for names in raw.get("total", ()))
    return Sensors(**{**as_tuples(raw), "total": total})


@lru_cache(maxsize=1)
def board_reference() -> BoardReference:
    """Load the shipped file once. Raises BugError if it does not have this shape."""
    path = resources.data_dir("profiles") / "boards.toml"
    try:
        raw = resources.load_toml(path)
        return BoardReference(
            machines=tuple(HostFacts(**as_tuples(value)) for value in raw["machine"]),
            issues=tuple(KnownIssue(**as_tuples(value)) for value in raw["issue"]),
            drivers=tuple(Driver(**value) for value in raw["driver"]),
            sensors=tuple(_sensors(value) for value in raw["sensors"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BugError(f"{path.name} cannot be read: {error}", "reinstall edgellm") from error
