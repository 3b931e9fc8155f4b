"""List what could be served: files of the store and rows of the catalogue, ranked, by name without the headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from edge.errors import BadDataError, ConfigError
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile, open_model
from edge.models.store import Store, StoreEntry
from edge.plan.inputs import Candidate, Weights, candidate_of
from edge.plan.kv_cache import KvBytes, LayerShape
from edge.resources import data_dir, load_toml
from edge.units import format_bytes

if TYPE_CHECKING:
    from edge.models.catalogue import CatalogueQuant, CatalogueRow


UNRANKED = 1 << 20
# Rows that do not know their KV cache: eight heads of 128 values for K and V in f16, as Llama 3 and Qwen3 have.
_KV_BYTES_PER_LAYER = 2 * 8 * 128 * 2
_N_LAYER = 32  # of 3 to 9 GB models; rows that do not know theirs
_N_VOCAB = 150_000  # Qwen3 152k, Llama 3 128k, gpt-oss 201k

# The fingerprint of a file that is only planned with.
NOT_DOWNLOADED = "not downloaded"


class DownloadCandidate(Struct, frozen=True):
    """One quantization of a model. `path` None: not downloaded, `source` is what `model pull` takes.

    `quant` is empty and `bytes` 0 where only a download tells. `active` is the share of the weights that one token
    reads: 1 for dense models.
    """

    name: str
    quant: str
    bytes: int
    path: str | None = None
    source: str | None = None
    rank: int = UNRANKED  # position in profiles/ranking.toml, 0 is best
    active: float = 1.0

    @property
    def id(self) -> str:
        return f"{self.name}:{self.quant}" if self.quant else self.name

    @property
    def sized(self) -> str:
        """Return the id with the size of the download, where that is known."""
        return f"{self.id} ({format_bytes(self.bytes)})" if self.bytes else self.id


def not_downloaded(offer: DownloadCandidate, models_dir: Path, rows: Sequence[CatalogueRow] | None = None) -> Candidate:
    """Build a candidate from the catalogue's figures, for a plan before the download; the header decides afterwards."""
    row, quant = _row_of(offer, _rows(rows))
    n_layer = max(1, row.n_layer or _N_LAYER)
    kv_bytes = _KV_BYTES_PER_LAYER * n_layer if row.kv_bytes_per_token is None else row.kv_bytes_per_token
    per_layer = kv_bytes // (4 * n_layer)  # values of K, and as many of V, in f16
    # What does not grow with the context counts as recurrent state, divided over all layers.
    layer = LayerShape("full", per_layer, per_layer, recurrent=row.fixed_bytes > 0)
    names = [file.path for file in quant.files] or [f"{row.name}-{quant.quant}.gguf"]
    paths = tuple(f"{models_dir}/{name}" for name in names)
    meta = _expected_meta(row, quant, n_layer)
    return Candidate(
        ModelFile(row.name, quant.quant, paths[0], paths, quant.bytes, NOT_DOWNLOADED, meta),
        _expected_weights(quant.bytes, n_layer),
        KvBytes((layer,) * n_layer, 0, row.fixed_bytes // n_layer),
    )


def _expected_meta(row: CatalogueRow, quant: CatalogueQuant, n_layer: int) -> ModelMeta:
    """Return what buffers, offload and context depend on, with a feed-forward three times as wide as the embedding."""
    # Embedding widths of Qwen3-0.6B (1024), 4B (2560) and 8B (4096).
    width = 1024 if quant.bytes < 10**9 else 2560 if quant.bytes < 5 * 10**9 else 4096
    return ModelMeta(
        arch="unknown",
        name=row.name,
        n_layer=n_layer,
        n_embd=width,
        n_head=32,
        n_head_kv=(1,) * n_layer,
        key_length=width // 32,
        value_length=width // 32,
        n_ctx_train=row.n_ctx_train or 8192,
        n_vocab=_N_VOCAB,
        sliding_window=None,
        n_expert=0,
        quant=quant.quant,
        tensors=(),
        tensor_bytes=quant.bytes,
        data_offset=0,
        file_bytes=quant.bytes,
        chat_template=row.role == "chat",
        tokenizer=None,
        file_type=None,
        extra={"unknown.feed_forward_length": 3 * width},
    )


def _expected_weights(size: int, n_layer: int) -> Weights:
    """Estimate the weights: the input table's share falls with size, and models under 5 GB keep it twice, as output."""
    tied = size < 5 * 10**9
    table = int(size * (0.15 if tied else 0.1 if size < 10**10 else 0.02))
    output = 0 if tied else table
    each = (size - table - output) // n_layer
    rest = size - table - output - each * n_layer
    return Weights(table, output + rest, (each,) * n_layer, table if tied else 0)


class Rank(Struct, frozen=True):
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


def offers(
    entries: Iterable[StoreEntry], ranks: dict[str, Rank], rows: Sequence[CatalogueRow] | None = None
) -> list[DownloadCandidate]:
    """Return usable files and the catalogue's other chat models. `rows` None is the shipped catalogue."""
    here = [_ranked(offer, ranks) for offer in stored(entries)]
    present = {(offer.name.lower(), offer.quant) for offer in here}
    there = [
        _ranked(DownloadCandidate(row.name, quant.quant, quant.bytes, None, quant.source), ranks)
        for row in _rows(rows)
        if row.role == "chat" and row.name.lower() in ranks
        for quant in row.quants
        if (row.name.lower(), quant.quant) not in present
    ]
    return here + there


def loader(
    store: Store, skipped: list[str], rows: Sequence[CatalogueRow] | None = None
) -> Callable[[DownloadCandidate], Candidate | None]:
    """Return a function that reads each header once. It appends files that cannot be used to `skipped`."""
    known: dict[str, Candidate | None] = {}

    def load(offer: DownloadCandidate) -> Candidate | None:
        key = offer.path or offer.id
        if key not in known:
            try:
                known[key] = (
                    candidate_of(open_model(Path(offer.path), headers=store.headers))
                    if offer.path
                    else not_downloaded(offer, store.models_dir, rows)
                )
            except BadDataError as error:
                skipped.append(str(error))
                known[key] = None
        return known[key]

    return load


def stored(entries: Iterable[StoreEntry]) -> list[DownloadCandidate]:
    """Return the usable files of the store."""
    usable = (entry for entry in entries if entry.verdict is None)
    return [DownloadCandidate(entry.name, entry.quant, entry.bytes, str(entry.path)) for entry in usable]


def _rows(rows: Sequence[CatalogueRow] | None) -> Sequence[CatalogueRow]:
    """Load the shipped catalogue where none is given; late, because a start with a named model does without it."""
    if rows is not None:
        return rows
    from edge.models.catalogue import load

    return load()


def _ranked(offer: DownloadCandidate, ranks: dict[str, Rank]) -> DownloadCandidate:
    rank = ranks.get(offer.name.lower())
    return offer if rank is None else replace(offer, rank=rank.position, active=rank.active)


def _row_of(offer: DownloadCandidate, rows: Sequence[CatalogueRow]) -> tuple[CatalogueRow, CatalogueQuant]:
    for row in rows:
        quant = row.quant(offer.quant) if row.name.lower() == offer.name.lower() else None
        if quant is not None:
            return row, quant
    raise KeyError(offer.id)
