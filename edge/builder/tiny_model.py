"""Write a GGUF model of a few hundred kilobytes, enough to prove that an engine computes.

The weights are random, but head size 64 and Q8_0 matrices run the same kernels as a real
model. Format: github.com/ggml-org/ggml, docs/gguf.md, version 3.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

# GGUF_DEFAULT_ALIGNMENT, ggml/include/gguf.h.
_ALIGNMENT = 32
_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_TYPE_F32, _TYPE_Q8_0 = 0, 8
_BLOCK = 32  # values in one Q8_0 block: a half-float scale and 32 signed bytes
_PATTERN_BLOCKS = 30_011  # a prime, so that rows differ


class Shape(Struct, frozen=True):
    """Sizes of the model; every row length is a multiple of 32."""

    n_layer: int = 2
    n_embd: int = 128
    n_head: int = 2
    n_ff: int = 256
    n_ctx_train: int = 512


class _Tensor(Struct, frozen=True):
    """A tensor: `pattern` is repeated to `size` bytes."""

    name: str
    shape: tuple[int, ...]  # GGUF's order: row length first
    type: int
    pattern: bytes
    size: int


SMALLEST = Shape()
NO_TEXTS: Mapping[str, str] = {}


def write_tiny_model(path: Path, shape: Shape = SMALLEST) -> Path:
    """Write the model piece by piece; the same arguments give the same bytes. Raises OSError."""
    with path.open("wb") as file:
        file.writelines(tiny_model(shape))
    return path


def tiny_model(shape: Shape = SMALLEST, *, texts: Mapping[str, str] = NO_TEXTS) -> Iterator[bytes]:
    """Yield the file in pieces. The matrices of a larger shape repeat a pattern. `texts`: more keys of the header."""
    tokens, scores, types = _vocabulary()
    tensors = _tensors(shape, len(tokens), random.Random(1))
    metadata: list[tuple[str, int, Any]] = [
        ("general.architecture", _STRING, "llama"),
        ("general.name", _STRING, "edgellm tiny"),
        ("general.alignment", _U32, _ALIGNMENT),
        ("general.file_type", _U32, 7),
        ("llama.block_count", _U32, shape.n_layer),
        ("llama.context_length", _U32, shape.n_ctx_train),
        ("llama.embedding_length", _U32, shape.n_embd),
        ("llama.feed_forward_length", _U32, shape.n_ff),
        ("llama.attention.head_count", _U32, shape.n_head),
        ("llama.attention.head_count_kv", _U32, shape.n_head),
        ("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        ("llama.rope.dimension_count", _U32, shape.n_embd // shape.n_head),
        ("llama.vocab_size", _U32, len(tokens)),
        ("tokenizer.ggml.model", _STRING, "llama"),
        ("tokenizer.ggml.tokens", _ARRAY, (_STRING, tokens)),
        ("tokenizer.ggml.scores", _ARRAY, (_F32, scores)),
        ("tokenizer.ggml.token_type", _ARRAY, (_I32, types)),
        ("tokenizer.ggml.bos_token_id", _U32, 1),
        ("tokenizer.ggml.eos_token_id", _U32, 2),
        ("tokenizer.ggml.unknown_token_id", _U32, 0),
        ("tokenizer.ggml.add_bos_token", _BOOL, True),
        *((key, _STRING, text) for key, text in texts.items()),
    ]
    yield _header(metadata, tensors)
    for tensor in tensors:
        yield from _data(tensor)


def _vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Return special tokens, a token for every byte, and letters, which cover any text."""
    normal, unknown, control, byte = 1, 2, 3, 6
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    types = [unknown, control, control, *([byte] * 256)]
    letters = ["▁", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
    tokens += letters
    types += [normal] * len(letters)
    while len(tokens) % _BLOCK:
        tokens.append(f"▁t{len(tokens)}")
        types.append(normal)
    return tokens, [-float(index) for index in range(len(tokens))], types


def _tensors(shape: Shape, n_vocab: int, chance: random.Random) -> list[_Tensor]:
    embd, ff = shape.n_embd, shape.n_ff

    def matrix(name: str, row: int, rows: int) -> _Tensor:
        blocks = row * rows // _BLOCK
        # Variance 1/row keeps activations near 1 through the layers: no NaN in f16, whatever the kernels.
        scale = struct.pack("<e", 1.0 / 127 / row**0.5)
        pattern = b"".join(scale + chance.randbytes(_BLOCK) for _ in range(min(blocks, _PATTERN_BLOCKS)))
        return _Tensor(name, (row, rows), _TYPE_Q8_0, pattern, blocks * (_BLOCK + 2))

    def ones(name: str) -> _Tensor:
        return _Tensor(name, (embd,), _TYPE_F32, struct.pack("<f", 1.0), 4 * embd)

    found = [matrix("token_embd.weight", embd, n_vocab), ones("output_norm.weight")]
    found.append(matrix("output.weight", embd, n_vocab))
    for layer in range(shape.n_layer):
        block = f"blk.{layer}"
        found.append(ones(f"{block}.attn_norm.weight"))
        found += [matrix(f"{block}.attn_{part}.weight", embd, embd) for part in ("q", "k", "v", "output")]
        found.append(ones(f"{block}.ffn_norm.weight"))
        found += [matrix(f"{block}.ffn_{part}.weight", embd, ff) for part in ("gate", "up")]
        found.append(matrix(f"{block}.ffn_down.weight", ff, embd))
    return found


def _header(metadata: list[tuple[str, int, Any]], tensors: list[_Tensor]) -> bytes:
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, kind, value in metadata:
        out += _string(key) + struct.pack("<I", kind) + _value(kind, value)
    offset = 0
    for tensor in tensors:
        out += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + struct.pack("<IQ", tensor.type, offset)
        offset += _padded(tensor.size)
    return bytes(out) + bytes(_padded(len(out)) - len(out))


def _data(tensor: _Tensor) -> Iterator[bytes]:
    whole, rest = divmod(tensor.size, len(tensor.pattern))
    for _ in range(whole):
        yield tensor.pattern
    yield tensor.pattern[:rest] + bytes(_padded(tensor.size) - tensor.size)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind == _ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?"}[kind], value)
