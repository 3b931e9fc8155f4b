"""Choose the model files of a plan: those that the configuration names, or one selected from store and catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from edge.config.models import id_of
from edge.config.values import Config, ModelConfig, Preset
from edge.errors import ConfigError, ModelMissingError
from edge.models.quant import QuantPreference, matching, order
from edge.models.store import Store, StoreEntry
from edge.plan.candidates import DownloadCandidate, loader, not_downloaded, offers, ranking, stored
from edge.plan.companions import with_companions
from edge.plan.inputs import Candidate, PlanInputs, candidate_of
from edge.plan.select import pick, select, smaller_quants
from edge.units import format_bytes

if TYPE_CHECKING:
    from edge.models.catalogue import CatalogueRow


class Chosen(Struct, frozen=True):
    """Candidates by model id. `smaller`: files for later rungs. `absent`: not downloaded."""

    models: dict[str, tuple[Candidate, ModelConfig]]
    smaller: dict[str, tuple[Candidate, ...]]
    absent: dict[str, DownloadCandidate]
    notes: tuple[str, ...] = ()


class Chooser:
    """A chooser over one listing of the store; it reads only the headers that it considers, once each."""

    def __init__(self, store: Store, inputs: PlanInputs, rows: Sequence[CatalogueRow] | None = None) -> None:
        self._store = store
        self._inputs = inputs
        self._rows = rows
        self._entries: list[StoreEntry] | None = None
        self._skipped: list[str] = []
        self._load = loader(store, self._skipped, rows)

    def choose(self, config: Config, preset: Preset) -> Chosen:
        """Return the candidates of every configured model. Raises ModelMissingError, BadModelError, DoesNotFitError."""
        if not config.models:
            return self._selected(preset)
        chosen = Chosen({}, {}, {})
        for model in config.models:
            if model.command:
                continue  # another engine reads its own files
            own: dict[str, Any] = dict(model.set)
            wanted = replace(preset, **own)
            found, smaller, missing = self._named(model, wanted)
            chosen.models[model.id] = (self._with_files(found, wanted), model)
            chosen.smaller[model.id] = tuple(with_companions(each, wanted, self._store) for each in smaller)
            if missing is not None:
                chosen.absent[model.id] = missing
        return replace(chosen, notes=tuple(self._skipped))

    @property
    def entries(self) -> list[StoreEntry]:
        if self._entries is None:
            self._entries = self._store.list()
        return self._entries

    def _selected(self, preset: Preset) -> Chosen:
        found = select(offers(self.entries, ranking(), self._rows), preset, self._inputs, self._load)
        model_id = id_of(found.offer.name)
        candidate = self._with_files(found.candidate, preset)
        config = ModelConfig(model_id, candidate.file.path, origin="selected")
        notes = [f"no model was named: {found.offer.id} is {found.because}"]
        if found.tokens_s is not None:
            reads = f", the cores {found.prompt_tokens_s:.0f} tokens/s of a prompt" if found.prompt_tokens_s else ""
            notes.append(f"{found.offer.id}: memory bandwidth allows about {found.tokens_s:.0f} tokens/s{reads}")
        if found.better is not None:
            size = format_bytes(found.better.bytes)
            notes.append(f"{found.better.id} would fit and is better: edgellm model pull {found.better.id} ({size})")
        return Chosen(
            {model_id: (candidate, config)},
            {model_id: tuple(self._with_companions(found.smaller, preset))},
            {} if found.offer.path else {model_id: found.offer},
            (*notes, *self._skipped),
        )

    def _with_files(self, candidate: Candidate, preset: Preset) -> Candidate:
        """Return the candidate with its companions. Raises NotDownloadedError for a drafter that can be pulled."""
        try:
            return with_companions(candidate, preset, self._store)
        except ModelMissingError:
            drafter = self._absent_drafter(preset)
            if drafter is None:
                raise
            raise fetch_first({"draft": drafter}) from None

    def _absent_drafter(self, preset: Preset) -> DownloadCandidate | None:
        """Return what to pull for the key draft: a row of the catalogue, or a source whose text holds no secret."""
        from edge.models import catalogue, source  # late, as in _absent

        if source.is_source(preset.draft):
            parsed = source.parse(preset.draft)
            known = isinstance(parsed, (source.HubSource, source.PypiSource))
            return DownloadCandidate(str(parsed), "", 0, None, str(parsed)) if known else None
        name, _, quant = preset.draft.partition(":")
        row = catalogue.find(name, self._rows)
        group = _offers_of(row) if row is not None else []
        group = matching(group, quant) if quant else group
        return order(group, QuantPreference(preset.quant, preset.prefer))[0] if group else None

    def _with_companions(self, smaller: Iterable[Candidate], preset: Preset) -> Iterator[Candidate]:
        """Yield the candidates that the companions fit: another model may have another vocabulary."""
        for each in smaller:
            with suppress(ConfigError):
                yield with_companions(each, preset, self._store)

    def _named(
        self, model: ModelConfig, preset: Preset
    ) -> tuple[Candidate, tuple[Candidate, ...], DownloadCandidate | None]:
        name, _, quant = model.ref.partition(":")
        # A path or a source, not a name of the catalogue.
        if "/" in model.ref or model.ref.lower().endswith(".gguf"):
            return candidate_of(self._store.resolve(model.ref)), (), None
        group = stored(entry for entry in self.entries if entry.name.lower() == name.lower())
        exact = matching(group, quant) if quant else group
        if exact:
            found = None if quant or len(exact) == 1 else pick(exact, preset, self._inputs, self._load)
            offer = found[0] if found else order(exact, QuantPreference(preset.quant, preset.prefer))[0]
            loaded = self._load(offer)
            if loaded is not None:
                return loaded, tuple(smaller_quants(offer, group, self._load)), None
        return self._absent(name, quant, model, preset)

    def _absent(
        self, name: str, quant: str, model: ModelConfig, preset: Preset
    ) -> tuple[Candidate, tuple[Candidate, ...], DownloadCandidate | None]:
        """Take a model that is not in the store from the catalogue. Raises ModelMissingError."""
        from edge.models import catalogue  # late: a start with a downloaded model does without it

        row = catalogue.find(name, self._rows)
        if row is None:
            return candidate_of(self._store.resolve(model.ref)), (), None
        group = _offers_of(row)
        if quant:
            group = matching(group, quant)
            if not group:
                there = ", ".join(each.quant for each in row.quants)
                raise ModelMissingError(f"there is no {quant} of {row.name}", f"the catalogue has {there}")
        found = pick(group, preset, self._inputs, self._load)
        offer = found[0] if found else min(group, key=lambda one: one.bytes)
        return not_downloaded(offer, self._store.models_dir, self._rows), (), offer


def _offers_of(row: CatalogueRow) -> list[DownloadCandidate]:
    return [DownloadCandidate(row.name, each.quant, each.bytes, None, each.source) for each in row.quants]


class NotDownloadedError(ModelMissingError):
    """A plan names models of the catalogue that are not in the store. `downloads`, by model id."""

    def __init__(self, message: str, hint: str, downloads: dict[str, DownloadCandidate]) -> None:
        super().__init__(message, hint)
        self.downloads = downloads


def fetch_first(missing: dict[str, DownloadCandidate]) -> NotDownloadedError:
    """Build the error for a start whose models are not downloaded."""
    names = ", ".join(offer.id for offer in missing.values())
    size = sum(offer.bytes for offer in missing.values())
    costs = f" ({format_bytes(size)})" if size else ""
    pulls = " && ".join(f"edgellm model pull {offer.id}" for offer in missing.values())
    return NotDownloadedError(f"{names} is not downloaded", f"{pulls}{costs}, or start with --yes", missing)
