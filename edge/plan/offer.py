"""A model that could be served: a file that is here, or one that the catalogue knows. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge.model.file import ModelFile
from edge.model.meta import ModelMeta, Tensor

if TYPE_CHECKING:
    from edge.model.catalogue import CatalogueQuant, CatalogueRow

UNRANKED = 1 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """`path` None: not here, `source` says where it can be had. `active` is the part of the weights a token reads."""

    name: str
    quant: str
    bytes: int
    path: str | None = None
    source: str | None = None
    rank: int = UNRANKED  # place in profiles/ranking.toml, 0 is best
    active: float = 1.0

    @property
    def id(self) -> str:
        return f"{self.name}:{self.quant}"


def expected_file(row: CatalogueRow, quant: CatalogueQuant, folder: str) -> ModelFile:
    """What the catalogue's figures say about a file that is not here: good for an estimate of memory, no more."""
    n_layer = max(1, row.n_layer or 32)
    per_layer = (row.kv_bytes_per_token or 0) // (4 * n_layer)  # f16, K and V
    meta = ModelMeta(
        arch="catalogue",
        name=row.name,
        n_layer=n_layer,
        n_embd=_width(quant.bytes),
        n_head=32,
        n_head_kv=(1,) * n_layer,
        key_length=per_layer,
        value_length=per_layer,
        n_ctx_train=row.n_ctx_train or 8192,
        n_vocab=150_000,
        sliding_window=None,
        n_expert=0,
        quant=quant.quant,
        tensors=_tensors(quant.bytes, n_layer),
        tensor_bytes=quant.bytes,
        data_offset=0,
        file_bytes=quant.bytes,
        chat_template=row.role == "chat",
        tokenizer=None,
        file_type=None,
        extra={
            "catalogue.feed_forward_length": 3 * _width(quant.bytes),
            # What does not grow with the context, as a state of that many f32 in every layer.
            "catalogue.ssm.state_size": 1,
            "catalogue.ssm.inner_size": row.fixed_bytes // (4 * n_layer),
        },
    )
    paths = tuple(f"{folder}/{file.path}" for file in quant.files) or (f"{folder}/{row.name}-{quant.quant}.gguf",)
    return ModelFile(row.name, quant.quant, paths[0], paths, quant.bytes, "not here", meta)


def _width(size: int) -> int:
    """An embedding width as models of this size have it: 1024 at half a gigabyte, 4096 from six on."""
    return 1024 if size < 10**9 else 2560 if size < 5 * 10**9 else 4096


def _tensors(size: int, n_layer: int) -> tuple[Tensor, ...]:
    """The share of the input table falls with size; small models use it as output too, and then it is kept twice."""
    tied = size < 5 * 10**9
    table = int(size * (0.15 if tied else 0.1 if size < 10**10 else 0.02))
    output = 0 if tied else table
    each = (size - table - output) // n_layer
    rest = size - table - output - each * n_layer
    return (
        Tensor("token_embd.weight", "?", (table,), 0, table),
        *(Tensor(f"blk.{i}.all.weight", "?", (each,), 0, each) for i in range(n_layer)),
        Tensor("output_norm.weight", "F32", (rest,), 0, rest),
        *((Tensor("output.weight", "?", (output,), 0, output),) if output else ()),
    )
