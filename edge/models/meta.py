"""Metadata of a GGUF file. Values only."""

from __future__ import annotations

from msgspec import Struct, field


class Tensor(Struct, frozen=True):
    name: str
    type: str  # ggml's name: "Q5_K", "F32", ...
    shape: tuple[int, ...]
    offset: int  # from the start of the tensor data, bytes
    bytes: int


class Split(Struct, frozen=True):
    """One shard of a set (`split.no`, `split.count`)."""

    no: int
    count: int


class ModelMeta(Struct, frozen=True):
    """A header. Per-layer tuples have n_layer entries; a head count of 0 is a layer without attention."""

    arch: str
    name: str | None
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: tuple[int, ...]  # per layer
    key_length: int
    value_length: int
    n_ctx_train: int
    n_vocab: int | None
    sliding_window: int | None
    n_expert: int
    quant: str  # by metadata and tensors: "Q5_K_M", "Q4_1", "MXFP4", "unknown"
    tensors: tuple[Tensor, ...]
    tensor_bytes: int
    data_offset: int  # where tensor data begins in the file
    file_bytes: int
    chat_template: bool
    tokenizer: str | None
    file_type: int | None
    split: Split | None = None
    kind: str = "model"  # general.type: model | adapter | mmproj | imatrix | vocab
    extra: dict[str, int | float | str | bool] = field(default_factory=dict)  # all scalar keys, whole names
    # Numeric arrays outside the tokenizer, whole names: per-layer counts, window patterns, rope sections.
    arrays: dict[str, tuple[int | float | bool, ...]] = field(default_factory=dict)
