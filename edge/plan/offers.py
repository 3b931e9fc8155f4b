"""List what could be served: files of the store and rows of the catalogue, ranked, by name without the headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import BadDataError, ConfigError
from edge.model.open import open_model
from edge.model.store import Entry
from edge.plan.offer import UNRANKED, Offer, expected_subject
from edge.plan.subject import Subject, candidate_of
from edge.resources import data_dir, load_toml

if TYPE_CHECKING:
    from edge.model.catalogue import CatalogueQuant, CatalogueRow


@dataclass(frozen=True, slots=True)
class Rank:
    position: int
    active: float


def ranking() -> dict[str, Rank]:
    """Read profiles/ranking.toml, by lower-case name. Raises ConfigError."""
    path = data_dir("profiles") / "ranking.toml"
    try:
        rows = load_toml(path)["model"]
        return {str(row["name"]).lower(): Rank(i, float(row.get("active", 1))) for i, row in enumerate(rows)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: {error!r}", "reinstall edgellm") from None


def offers(entries: Iterable[Entry], ranks: dict[str, Rank], rows: Sequence[CatalogueRow] | None = None) -> list[Offer]:
    """Return usable files and the catalogue's other chat models. `rows` None is the shipped catalogue."""
    here = [
        _ranked(Offer(entry.name, entry.quant, entry.bytes, str(entry.path)), ranks)
        for entry in entries
        if entry.verdict is None
    ]
    present = {(offer.name.lower(), offer.quant) for offer in here}
    there = [
        _ranked(Offer(row.name, quant.quant, quant.bytes, None, quant.source), ranks)
        for row in _rows(rows)
        if row.role == "chat" and row.name.lower() in ranks
        for quant in row.quants
        if (row.name.lower(), quant.quant) not in present
    ]
    return here + there


def loader(
    models_dir: Path, skipped: list[str], rows: Sequence[CatalogueRow] | None = None
) -> Callable[[Offer], Subject | None]:
    """Return a function that reads each header once. It appends files that cannot be used to `skipped`."""
    known: dict[str, Subject | None] = {}

    def load(offer: Offer) -> Subject | None:
        key = offer.path or offer.id
        if key not in known:
            try:
                known[key] = (
                    candidate_of(open_model(Path(offer.path))) if offer.path else absent(offer, models_dir, rows)
                )
            except BadDataError as error:
                skipped.append(str(error))
                known[key] = None
        return known[key]

    return load


def absent(offer: Offer, models_dir: Path, rows: Sequence[CatalogueRow] | None = None) -> Subject:
    """Return what the catalogue expects of a file that is not downloaded."""
    row, quant = _row_of(offer, _rows(rows))
    return expected_subject(row, quant, str(models_dir))


def of_name(entries: Iterable[Entry], name: str, ranks: dict[str, Rank]) -> list[Offer]:
    """Return the files of one model in the store."""
    same = (entry for entry in entries if entry.name.lower() == name.lower() and entry.verdict is None)
    return [_ranked(Offer(entry.name, entry.quant, entry.bytes, str(entry.path)), ranks) for entry in same]


def _rows(rows: Sequence[CatalogueRow] | None) -> Sequence[CatalogueRow]:
    """Load the shipped catalogue where none is given; late, because a start with a named model does without it."""
    if rows is not None:
        return rows
    from edge.model.catalogue import load

    return load()


def _ranked(offer: Offer, ranks: dict[str, Rank]) -> Offer:
    rank = ranks.get(offer.name.lower(), Rank(UNRANKED, 1.0))
    return Offer(offer.name, offer.quant, offer.bytes, offer.path, offer.source, rank.position, rank.active)


def _row_of(offer: Offer, rows: Sequence[CatalogueRow]) -> tuple[CatalogueRow, CatalogueQuant]:
    for row in rows:
        quant = row.quant(offer.quant) if row.name.lower() == offer.name.lower() else None
        if quant is not None:
            return row, quant
    raise KeyError(offer.id)
