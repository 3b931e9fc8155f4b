"""Write a model of any size with random weights, to measure loading and starts with.

    python -m tests.bench.random_model OUT.gguf --gb 8.7 [--type Q5_K_M] [--vocabulary MODEL.gguf] [--seed N]

Its answers are noise; the engine reads, allocates and computes as for a real model of the architecture llama. From 8 GB
on it has the layers of Mistral Nemo 12B, whose 40 are 8.7 GB as Q5_K_M, with 131072 tokens. Every tensor has bytes of
its own, so that no file system and no controller can share or compress them. Without another model's vocabulary
the tokens are bytes and numbered words. Needs numpy, and gguf for --vocabulary.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fakes.gguf_writer import TYPES, Gguf  # a script: the checkout has to be found first

CHUNK_BLOCKS = 1 << 18  # 8 to 55 MB
# Blocks of ggml/src/ggml-common.h with random quants, and the standard deviation of a weight over its block's scale. In
# Q5_K also the scales and minimums of its eight parts are random; minimums of 15.5 scales make the mean zero.
BLOCKS: dict[str, tuple[Any, float]] = {
    "Q8_0": (np.dtype([("scale", "<f2"), ("quants", "u1", 32)]), 74),
    "Q5_K": (np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("quants", "u1", 172)]), 527),
    "Q6_K": (np.dtype([("quants", "u1", 208), ("scale", "<f2")]), 1365),
}
NAMES = {number: name for name, (number, _, _) in TYPES.items()}
FILE_TYPES = {"Q8_0": 7, "Q5_K_M": 17}  # LLAMA_FTYPE_MOSTLY_*
FAMILY = ("tokenizer.",)


class Shape(NamedTuple):
    """Sizes of the layers. `tokens`: of a vocabulary made here."""

    width: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    tokens: int


SHAPES = (
    (8.0, Shape(5120, 32, 8, 128, 14336, 131072)),
    (3.0, Shape(3072, 48, 12, 64, 8192, 49152)),
    (0.0, Shape(2048, 32, 8, 64, 5376, 8192)),
)


def more_bits(layer: int, layers: int) -> bool:
    """Return whether Q5_K_M has Q6_K in this layer's attn_v and ffn_down (use_more_bits of llama-quant.cpp)."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def header(gb: float, quant: str, vocabulary: Path | None = None) -> Gguf:
    """Return the header of a model of about so many gigabytes."""
    shape = next(each for least, each in SHAPES if gb >= least)
    file = Gguf("llama").set("general.type", "model").set("general.name", f"random {gb:g} GB")
    file.set("general.file_type", FILE_TYPES[quant])
    tokens = shape.tokens if vocabulary is None else copied_tokens(file, vocabulary)
    if vocabulary is None:
        made_tokens(file, tokens)
    plain, better = ("Q5_K", "Q6_K") if quant == "Q5_K_M" else (quant, quant)
    file.tensor("token_embd.weight", shape.width, tokens, type=plain)
    file.tensor("output.weight", shape.width, tokens, type=better).tensor("output_norm.weight", shape.width)
    ends = sum(tensor.size for tensor in file.tensors)
    layer_bytes = sum(tensor.size for tensor in add_layer(Gguf(), shape, 0, plain, plain).tensors)
    layers = max(1, round((gb * 1e9 - ends) / layer_bytes / (1.035 if plain != better else 1)))
    for layer in range(layers):
        add_layer(file, shape, layer, plain, better if more_bits(layer, layers) else plain)
    for name, value in (
        ("block_count", layers),
        ("context_length", 8192),
        ("embedding_length", shape.width),
        ("feed_forward_length", shape.ff),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head),
        ("attention.value_length", shape.head),
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("rope.dimension_count", shape.head),
    ):
        file.set(f"llama.{name}", value)
    return file


def add_layer(file: Gguf, shape: Shape, layer: int, plain: str, better: str) -> Gguf:
    """Append the tensors of one layer; attn_v and ffn_down have the type `better`."""
    at, width = f"blk.{layer}", shape.width
    file.tensor(f"{at}.attn_norm.weight", width).tensor(f"{at}.ffn_norm.weight", width)
    file.tensor(f"{at}.attn_q.weight", width, shape.heads * shape.head, type=plain)
    file.tensor(f"{at}.attn_k.weight", width, shape.kv_heads * shape.head, type=plain)
    file.tensor(f"{at}.attn_v.weight", width, shape.kv_heads * shape.head, type=better)
    file.tensor(f"{at}.attn_output.weight", shape.heads * shape.head, width, type=plain)
    for name in ("ffn_gate", "ffn_up"):
        file.tensor(f"{at}.{name}.weight", width, shape.ff, type=plain)
    return file.tensor(f"{at}.ffn_down.weight", shape.ff, width, type=better)


def copied_tokens(file: Gguf, vocabulary: Path) -> int:
    """Set the tokenizer's keys as they stand in another file; return the number of tokens."""
    from gguf import GGUFReader  # late: the GPU machine has no such package

    reader = GGUFReader(vocabulary)
    for key, entry in reader.fields.items():
        if key.startswith(FAMILY):
            file.raw(key, b"".join(part.tobytes() for part in entry.parts[2:]))  # after the key's length and text
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def made_tokens(file: Gguf, count: int) -> None:
    """Set the keys of a SentencePiece vocabulary: every byte, letters, and numbered words."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    letters = ["▁", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
    words = [f"▁t{number}" for number in range(count - len(special) - len(letters))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(words))]  # unknown, control, byte, normal
    file.set("tokenizer.ggml.model", "llama").set("tokenizer.ggml.tokens", [*special, *letters, *words])
    file.set("tokenizer.ggml.scores", [-float(number) for number in range(count)])
    file.raw(
        "tokenizer.ggml.token_type", np.array([9, 5, count, 0], "<u4").tobytes() + np.array(types, "<i4").tobytes()
    )
    file.set("tokenizer.ggml.bos_token_id", 1).set("tokenizer.ggml.eos_token_id", 2)
    file.set("tokenizer.ggml.unknown_token_id", 0).set("tokenizer.ggml.add_bos_token", True)


def data(kind: str, size: int, row: int, random: np.random.Generator) -> Iterator[bytes]:
    """Yield the bytes of one tensor. A variance of 1/row keeps activations finite through all layers."""
    if kind == "F32":  # norms
        yield np.ones(size // 4, "<f4").tobytes()
        return
    block, spread = BLOCKS[kind]
    scale = 1 / (spread * row**0.5)
    left = size // block.itemsize
    while left:
        count = min(left, CHUNK_BLOCKS)
        blocks = np.frombuffer(bytearray(random.bytes(count * block.itemsize)), block)
        blocks["scale"] = scale
        if "minimum" in block.names:
            blocks["minimum"] = 15.5 * scale
        left -= count
        yield blocks.tobytes()


def write(file: Gguf, path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    head = file.header()
    with path.open("wb") as out:
        out.write(head.ljust(file.padded(len(head)), b"\0"))
        for tensor in file.tensors:
            for chunk in data(NAMES[tensor.type], tensor.size, tensor.dims[0], random):
                out.write(chunk)
            out.write(b"\0" * (file.padded(tensor.size) - tensor.size))
        out.flush()
        os.fsync(out.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gb", type=float, default=4.5)
    parser.add_argument("--type", choices=FILE_TYPES, default="Q8_0")
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    file = header(options.gb, options.type, options.vocabulary)
    write(file, options.out, options.seed)
    size, layers = options.out.stat().st_size, sum(each.name.endswith("attn_q.weight") for each in file.tensors)
    print(f"{options.out}: {options.type}, {layers} layers, {size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
