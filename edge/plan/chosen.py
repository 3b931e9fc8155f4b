"""Configuration and store → the model files of a plan: as named, or selected when nothing is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edge.config.models import id_of
from edge.config.values import Config, ModelConfig
from edge.errors import ModelMissingError
from edge.model.quant import QuantPreference, bits, matching, order
from edge.model.store import Entry, Store
from edge.plan.offer import Offer
from edge.plan.offers import Rank, absent, loader, of_name, offers, ranking
from edge.plan.select import pick, select, smaller_quants
from edge.plan.situation import Situation
from edge.plan.subject import Subject, subject
from edge.profile.profile import Wishes
from edge.units import format_bytes

if TYPE_CHECKING:
    from edge.model.catalogue import CatalogueRow


@dataclass(frozen=True, slots=True)
class Chosen:
    """`smaller`: files for later rungs, by model id. `absent`: what has to be fetched first, by model id."""

    models: dict[str, tuple[Subject, ModelConfig]]
    smaller: dict[str, tuple[Subject, ...]]
    absent: dict[str, Offer]
    notes: tuple[str, ...] = ()


class Chooser:
    """Lists the store once; reads the headers of what is considered, once each."""

    def __init__(self, store: Store, place: Situation, rows: Sequence[CatalogueRow] | None = None) -> None:
        self._store = store
        self._place = place
        self._rows = rows
        self._entries: list[Entry] | None = None
        self._skipped: list[str] = []
        self._load = loader(store.models_dir, self._skipped, rows)

    def choose(self, config: Config, wishes: Wishes) -> Chosen:
        """Raises ModelMissingError, BadModelError, DoesNotFitError, UsageError."""
        if not config.models:
            return self._selected(wishes)
        chosen = Chosen({}, {}, {})
        for model in config.models:
            own: dict[str, Any] = dict(model.set)
            found, smaller, missing = self._named(model, replace(wishes, **own))
            chosen.models[model.id] = (found, model)
            chosen.smaller[model.id] = smaller
            if missing is not None:
                chosen.absent[model.id] = missing
        return replace(chosen, notes=tuple(self._skipped))

    @property
    def entries(self) -> list[Entry]:
        if self._entries is None:
            self._entries = self._store.list()
        return self._entries

    def _selected(self, wishes: Wishes) -> Chosen:
        found = select(offers(self.entries, ranking(), self._rows), wishes, self._place, self._load)
        model_id = id_of(found.offer.name)
        notes = [f"no model was named: {found.offer.id} is {found.because}"]
        if found.tokens_s is not None:
            notes.append(f"{found.offer.id}: memory bandwidth allows about {found.tokens_s:.0f} tokens/s")
        if found.better is not None:
            size = format_bytes(found.better.bytes)
            notes.append(f"{found.better.id} would fit and is better: edgellm model pull {found.better.id} ({size})")
        return Chosen(
            {model_id: (found.subject, ModelConfig(model_id, found.subject.file.path, origin="selected"))},
            {model_id: found.smaller},
            {} if found.offer.path else {model_id: found.offer},
            (*notes, *self._skipped),
        )

    def _named(self, model: ModelConfig, wishes: Wishes) -> tuple[Subject, tuple[Subject, ...], Offer | None]:
        name, _, quant = model.ref.partition(":")
        if "/" in model.ref or model.ref.lower().endswith(".gguf"):
            return subject(self._store.resolve(model.ref)), (), None
        ranks: dict[str, Rank] = {}
        group = of_name(self.entries, name, ranks)
        exact = matching(group, quant) if quant else group
        if exact:
            first = order(exact, QuantPreference(wishes.quant, wishes.prefer))[0]
            found = None if quant or len(exact) == 1 else pick(exact, wishes, self._place, self._load)[0]
            offer = found[0] if found else first
            loaded = self._load(offer)
            if loaded is not None:
                return loaded, tuple(smaller_quants(offer, group, self._load)), None
        return self._absent(name, quant, model, wishes)

    def _absent(
        self, name: str, quant: str, model: ModelConfig, wishes: Wishes
    ) -> tuple[Subject, tuple[Subject, ...], Offer | None]:
        """Not here: as the catalogue expects it, else whatever the store says about the reference."""
        from edge.model import catalogue  # late: a start with a model that is here does without it

        row = catalogue.find(name, tuple(self._rows) if self._rows is not None else None)
        if row is None:
            return subject(self._store.resolve(model.ref)), (), None
        group = [Offer(row.name, each.quant, each.bytes, None, each.source) for each in row.quants]
        if quant:
            group = matching(group, quant)
            if not group:
                there = ", ".join(each.quant for each in row.quants)
                raise ModelMissingError(f"there is no {quant} of {row.name}", f"the catalogue has {there}")
        found = pick(group, wishes, self._place, self._load)[0]
        offer = found[0] if found else min(group, key=lambda one: (-bits(one.quant), one.bytes))
        return absent(offer, self._store.models_dir, self._rows), (), offer


class NotDownloadedError(ModelMissingError):
    """A plan names models of the catalogue that are not in the store. `downloads`, by model id."""

    def __init__(self, message: str, hint: str, downloads: dict[str, Offer]) -> None:
        super().__init__(message, hint)
        self.downloads = downloads


def fetch_first(missing: dict[str, Offer]) -> NotDownloadedError:
    """Build the error for a start whose models are not downloaded."""
    names = ", ".join(offer.id for offer in missing.values())
    size = format_bytes(sum(offer.bytes for offer in missing.values()))
    pulls = " && ".join(f"edgellm model pull {offer.id}" for offer in missing.values())
    return NotDownloadedError(f"{names} is not here yet", f"{pulls} ({size}), or start with --yes", missing)
