"""Writes GGUF files of any shape, healthy or broken, with the standard library only.

    Gguf("llama").model().save(path)                      a tiny healthy model
    Gguf("clip").set("general.type", "mmproj")...         anything else
    Gguf("llama").model().bytes()[:-100]                  cut

Values are typed by their Python type (bool, int -> u32 or u64, float, str, list); `raw` sets any type by number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def kind_of(value: Any) -> int:
    if isinstance(value, bool):
        return 7
    if isinstance(value, int):
        return 4 if 0 <= value < 1 << 32 else (10 if value > 0 else 5)
    if isinstance(value, float):
        return 6
    if isinstance(value, list):
        return ARRAY
    return STRING


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(f"<{_FORMATS[kind]}", value)


def pack(value: Any, kind: int | None = None) -> bytes:
    """A typed value as a GGUF key holds it."""
    kind = kind_of(value) if kind is None else kind
    if kind != ARRAY:
        return struct.pack("<I", kind) + scalar(kind, value)
    inner = kind_of(value[0]) if value else 4
    return struct.pack("<IIQ", ARRAY, inner, len(value)) + b"".join(scalar(inner, item) for item in value)


@dataclass
class TensorSpec:
    name: str
    dims: tuple[int, ...]
    type: int
    size: int
    offset: int | None = None


@dataclass
class Gguf:
    """One file in the making."""

    arch: str | None = "llama"
    version: int = 3
    alignment: int = 32
    keys: dict[str, bytes] = field(default_factory=dict)
    tensors: list[TensorSpec] = field(default_factory=list)
    tensor_count: int | None = None
    key_count: int | None = None
    fill: int = 0  # the byte that tensor data is made of

    def __post_init__(self) -> None:
        if self.arch is not None:
            self.set("general.architecture", self.arch)

    def set(self, key: str, value: Any, kind: int | None = None) -> Gguf:
        self.keys[key] = pack(value, kind)
        return self

    def raw(self, key: str, value: bytes) -> Gguf:
        """`value` holds the type number and whatever follows it."""
        self.keys[key] = value
        return self

    def drop(self, key: str) -> Gguf:
        self.keys.pop(key, None)
        return self

    def tensor(self, name: str, *dims: int, type: str = "F32") -> Gguf:
        number, block, size = TYPES[type]
        count = 1
        for dim in dims:
            count *= dim
        self.tensors.append(TensorSpec(name, dims, number, count // block * size))
        return self

    def model(
        self,
        n_layer: int = 2,
        n_embd: int = 256,
        n_head: int = 4,
        n_head_kv: int = 2,
        type: str = "Q5_K",
        file_type: int | None = 17,
        ctx: int = 8192,
        vocab: int = 32,
    ) -> Gguf:
        """A small dense model."""
        arch = self.arch
        self.set("general.type", "model").set("general.name", "tiny")
        if file_type is not None:
            self.set("general.file_type", file_type)
        for key, value in (
            ("block_count", n_layer),
            ("context_length", ctx),
            ("embedding_length", n_embd),
            ("attention.head_count", n_head),
            ("attention.head_count_kv", n_head_kv),
            ("feed_forward_length", 2 * n_embd),
            ("attention.layer_norm_rms_epsilon", 1e-5),
        ):
            self.set(f"{arch}.{key}", value)
        self.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.tokens", [f"t{i}" for i in range(vocab)])
        self.set("tokenizer.chat_template", "{{ messages }}")
        self.tensor("token_embd.weight", n_embd, vocab, type=type)
        for layer in range(n_layer):
            self.tensor(f"blk.{layer}.attn_norm.weight", n_embd)
            self.tensor(f"blk.{layer}.attn_q.weight", n_embd, n_embd, type=type)
            self.tensor(f"blk.{layer}.ffn_up.weight", n_embd, 2 * n_embd, type=type)
        self.tensor("output_norm.weight", n_embd)
        return self

    def projector(self, width: int = 256) -> Gguf:
        """A vision projector that gives vectors of `width`."""
        self.set("general.architecture", "clip").set("general.type", "mmproj").set("clip.has_vision_encoder", True)
        self.set("clip.vision.projection_dim", width).set("clip.projector_type", "gemma3")
        return self.tensor("v.patch_embd.weight", 32, 32).tensor("mm.input_projection.weight", 32, width)

    def header(self) -> bytes:
        out = [b"GGUF", struct.pack("<I", self.version)]
        out.append(struct.pack("<Q", len(self.tensors) if self.tensor_count is None else self.tensor_count))
        out.append(struct.pack("<Q", len(self.keys) if self.key_count is None else self.key_count))
        out += [text(key) + value for key, value in self.keys.items()]
        at = 0
        for tensor in self.tensors:
            offset = at if tensor.offset is None else tensor.offset
            out.append(
                text(tensor.name)
                + struct.pack(f"<I{len(tensor.dims)}QIQ", len(tensor.dims), *tensor.dims, tensor.type, offset)
            )
            at = offset + self.padded(tensor.size)
        return b"".join(out)

    def padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def bytes(self) -> bytes:
        head = self.header()
        return head.ljust(self.padded(len(head)), b"\0") + self.data()

    def data(self) -> bytes:
        return b"".join(bytes([self.fill]) * self.padded(tensor.size) for tensor in self.tensors)

    def save(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.bytes())
        return path

    def save_sparse(self, path: Path) -> Path:
        """The header, and a hole for the data: a file of any size at once."""
        head = self.header()
        end = self.padded(len(head)) + sum(self.padded(tensor.size) for tensor in self.tensors)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(end)
        return path


def save_set(
    folder: Path, prefix: str, count: int, *, skip: tuple[int, ...] = (), numbers: dict[int, int] | None = None
) -> list[Path]:
    """A split set of `count` shards as llama-gguf-split writes it. `skip`: left out; `numbers`: headers that lie."""
    paths = []
    for number in range(1, count + 1):
        shard = Gguf("llama")
        if number == 1:
            shard.model()
        else:
            shard.drop("general.architecture")
            shard.tensor(f"blk.{number}.ffn_up.weight", 256, 256, type="Q5_K")
        shown = (numbers or {}).get(number, number)
        shard.set("split.no", shown - 1, 2).set("split.count", count, 2).set("split.tensors.count", 8 + count - 1, 5)
        path = folder / f"{prefix}-{number:05d}-of-{count:05d}.gguf"
        if number not in skip:
            paths.append(shard.save(path))
    return paths
