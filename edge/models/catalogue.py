"""Read the catalogue `profiles/models.toml`: models with their files, sizes, licences and sources."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, field

from edge.errors import ConfigError, DoesNotFitError, UsageError
from edge.models.quant import QuantPreference, matching, select
from edge.resources import data_dir, load_toml
from edge.units import format_bytes

SCHEMA = 1
_DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")


class CatalogueFile(Struct, frozen=True):
    """One file. None is unknown: only figures that were read at the source are listed."""

    path: str
    bytes: int | None = None
    sha256: str | None = None
    approx_bytes: int | None = None  # where only a rounded figure was read


class CatalogueQuant(Struct, frozen=True):
    """One quantization. `bytes` of all files is exact, or close where the source gives a rounded figure."""

    quant: str
    files: tuple[CatalogueFile, ...]
    bytes: int
    exact: bool
    source: str  # what `pull` takes
    looked_up: str
    wheel_sha256: str | None = None  # of the wheel that holds the file (pypi:// sources)
    wheel_bytes: int | None = None
    read_on: str | None = None  # day of the newest dated source of its figures; None where none is dated

    @property
    def sha256(self) -> tuple[str | None, ...]:
        return tuple(file.sha256 for file in self.files)


class CatalogueRow(Struct, frozen=True):
    """One model. Its figures are for the time before the download; then the file's header counts. None is unknown."""

    name: str
    family: str
    quants: tuple[CatalogueQuant, ...] = field(name="quant")
    licence: str
    checked: str  # date, or "never": when it was last fetched
    n_layer: int | None = None
    kv_bytes_per_token: int | None = None  # f16 K and V, full-attention layers
    fixed_bytes: int = 0  # state and windows that do not grow with the context, per slot
    n_ctx_train: int | None = None
    role: str = "chat"  # chat | embedding | vision
    mmproj: CatalogueFile | None = None
    notes: tuple[str, ...] = ()
    pooling: str | None = None  # of embedding models: mean | last | cls

    @property
    def read_on(self) -> str | None:
        """Return the day on which the newest figure of the row was read or fetched; None is unknown."""
        fetched = () if self.checked == "never" else (self.checked,)
        return max((*fetched, *(quant.read_on for quant in self.quants if quant.read_on)), default=None)

    def quant(self, label: str) -> CatalogueQuant | None:
        return next((quant for quant in self.quants if quant.quant.upper() == label.upper()), None)


def load(path: Path | None = None) -> tuple[CatalogueRow, ...]:
    """Read the shipped catalogue, or the one at `path`. Raises ConfigError that names the row."""
    return _load(path or data_dir("profiles") / "models.toml")


@functools.lru_cache(maxsize=4)
def _load(path: Path) -> tuple[CatalogueRow, ...]:
    try:
        data = load_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the catalogue {path} cannot be read: {error}", "reinstall edgellm") from error
    if data.get("schema") != SCHEMA:
        raise ConfigError(f"{path} has schema {data.get('schema')}, this program reads {SCHEMA}", "update edgellm")
    sources = data.get("sources", {})
    return tuple(_row(row, path, sources) for row in data.get("model", ()))


def find(name: str, rows: Sequence[CatalogueRow] | None = None) -> CatalogueRow | None:
    """Return the row of a name, in any case."""
    return next((row for row in (load() if rows is None else rows) if row.name.lower() == name.lower()), None)


def choose(
    row: CatalogueRow,
    wanted: str | None = None,
    room_bytes: int | None = None,
    preference: QuantPreference | None = None,
) -> CatalogueQuant:
    """Return the quantization that `wanted` names, else the preferred one that takes at most `room_bytes`.

    Raises UsageError that lists what the row has, DoesNotFitError.
    """
    there = ", ".join(f"{one.quant} ({format_bytes(one.bytes)})" for one in row.quants)
    if wanted:
        named = matching(row.quants, wanted)
        if not named:
            raise UsageError(f"the catalogue has no {wanted} of {row.name}", f"it has {there}")
        return named[0]
    chosen = select(row.quants, preference, room_bytes)
    if chosen is not None:
        return chosen
    raise DoesNotFitError(
        f"no quant of {row.name} fits: {format_bytes(room_bytes or 0)} are free for weights, it has {there}",
        "take a smaller model: edgellm model list --catalogue",
    )


def by_source(text: str) -> tuple[CatalogueRow, CatalogueQuant] | None:
    """Return the row that lists a source, for its known hash."""
    for row in load():
        for quant in row.quants:
            if quant.source == text:
                return row, quant
    return None


def _row(row: Mapping[str, Any], path: Path, sources: Mapping[str, str]) -> CatalogueRow:
    try:
        return convert({**row, "quant": [_quant(quant, sources) for quant in row["quant"]]}, CatalogueRow)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        name = row.get("name", "?")
        raise ConfigError(f"{path}: model {name!r} lacks or misuses {error}", "see profiles/README.md") from error


def _read_on(looked_up: str, sources: Mapping[str, str]) -> str | None:
    """Return the newest day that the named sources state."""
    texts = [sources.get(key.split()[0], "") for key in looked_up.split(", ") if key.split()]
    return max((day for text in texts for day in _DAY.findall(text)), default=None)


def _quant(quant: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the row of a quantization with what follows from its files and sources."""
    sizes = [file.get("bytes") for file in quant["files"]]
    exact = None not in sizes
    read_on = _read_on(quant["looked_up"], sources)
    return {**quant, "bytes": sum(sizes) if exact else quant["approx_bytes"], "exact": exact, "read_on": read_on}
