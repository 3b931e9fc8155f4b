"""A model that could be served: a file of the store, or a row of the catalogue with what its figures allow to plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge.model.file import ModelFile
from edge.model.meta import ModelMeta
from edge.plan.kv import Memory
from edge.plan.layers import Layer
from edge.plan.subject import Subject
from edge.plan.weights import Weights

if TYPE_CHECKING:
    from edge.model.catalogue import CatalogueQuant, CatalogueRow

UNRANKED = 1 << 20
# Rows that do not know their KV cache: eight heads of 128 values for K and V in f16, as Llama 3 and Qwen3 have.
_KV_BYTES_PER_LAYER = 2 * 8 * 128 * 2
_N_LAYER = 32  # of 3 to 9 GB models; rows that do not know theirs
_N_VOCAB = 150_000  # Qwen3 152k, Llama 3 128k, gpt-oss 201k


@dataclass(frozen=True, slots=True)
class Offer:
    """One quantization of a model. `path` None: not downloaded, `source` is what `model pull` takes.

    `active` is the share of the weights that one token reads: 1 for dense models.
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
        return f"{self.name}:{self.quant}"


def expected_subject(row: CatalogueRow, quant: CatalogueQuant, folder: str) -> Subject:
    """Build a candidate from the catalogue's figures, for a plan before the download; the header decides afterwards."""
    n_layer = max(1, row.n_layer or _N_LAYER)
    kv_bytes = _KV_BYTES_PER_LAYER * n_layer if row.kv_bytes_per_token is None else row.kv_bytes_per_token
    per_layer = kv_bytes // (4 * n_layer)  # values of K, and as many of V, in f16
    # What does not grow with the context counts as recurrent state, divided over all layers.
    layer = Layer("full", per_layer, per_layer, recurrent=row.fixed_bytes > 0)
    paths = tuple(f"{folder}/{file.path}" for file in quant.files) or (f"{folder}/{row.name}-{quant.quant}.gguf",)
    meta = _expected_meta(row, quant, n_layer)
    return Subject(
        ModelFile(row.name, quant.quant, paths[0], paths, quant.bytes, "not downloaded", meta),
        _expected_weights(quant.bytes, n_layer),
        Memory((layer,) * n_layer, 0, row.fixed_bytes // n_layer),
    )


def _expected_meta(row: CatalogueRow, quant: CatalogueQuant, n_layer: int) -> ModelMeta:
    """Only what compute buffers, offload and context depend on; a feed-forward three times as wide as the embedding."""
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
    """The input table's share falls with size; models under 5 GB use it as output too, which keeps it twice."""
    tied = size < 5 * 10**9
    table = int(size * (0.15 if tied else 0.1 if size < 10**10 else 0.02))
    output = 0 if tied else table
    each = (size - table - output) // n_layer
    rest = size - table - output - each * n_layer
    return Weights(table, output + rest, (each,) * n_layer, table if tied else 0)
