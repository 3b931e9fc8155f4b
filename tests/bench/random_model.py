"""Write a model of any size with random weights and the vocabulary of another, to measure loading and starts with.

    python -m tests.bench.random_model VOCABULARY.gguf OUT.gguf --gb 4.5 [--seed N]

Its answers are noise; the engine reads, allocates and computes as for a real model: llama, Q8_0, a width of 3072 from
3 GB on and of 2048 below. Every tensor has bytes of its own, so that no file system and no controller can share or
compress them. Needs gguf and numpy, as `edgellm[dev]` has them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from tests.fakes.gguf_writer import Gguf

CHUNK_BLOCKS = 1 << 20  # of Q8_0: 36 MB
BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
SCALE = 2e-4  # |values| up to 127: weights up to 0.025, so that the activations stay finite
FAMILY = ("tokenizer.",)
HEAD = 64


def shape(gb: float) -> dict[str, int]:
    """Return width, feed-forward width and layers of a model of about so many gigabytes."""
    width = 3072 if gb >= 3 else 2048
    ff = 8 * width // 3 // 256 * 256
    layer_bytes = (2 * width * width + 2 * width * width // 4 + 3 * width * ff) * 34 / 32
    return {"width": width, "ff": ff, "layers": max(1, round(gb * 1e9 / layer_bytes))}


def header(vocabulary: Path, gb: float) -> Gguf:
    """Return the header, with the tokenizer's keys as they stand in the other file."""
    size, reader = shape(gb), GGUFReader(vocabulary)
    width, heads = size["width"], size["width"] // HEAD
    file = Gguf("llama").set("general.type", "model").set("general.name", f"random {gb:g} GB")
    file.set("general.file_type", 7)  # LLAMA_FTYPE_MOSTLY_Q8_0
    for name, value in (
        ("block_count", size["layers"]),
        ("context_length", 8192),
        ("embedding_length", width),
        ("feed_forward_length", size["ff"]),
        ("attention.head_count", heads),
        ("attention.head_count_kv", heads // 4),
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("rope.dimension_count", HEAD),
    ):
        file.set(f"llama.{name}", value)
    for key, entry in reader.fields.items():
        if key.startswith(FAMILY):
            file.raw(key, b"".join(part.tobytes() for part in entry.parts[2:]))  # after the key's length and text
    tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    file.tensor("token_embd.weight", width, tokens, type="Q8_0")
    for layer in range(size["layers"]):
        at = f"blk.{layer}"
        file.tensor(f"{at}.attn_norm.weight", width).tensor(f"{at}.ffn_norm.weight", width)
        for name, out in (("attn_q", width), ("attn_k", width // 4), ("attn_v", width // 4), ("attn_output", width)):
            file.tensor(f"{at}.{name}.weight", width, out, type="Q8_0")
        for name in ("ffn_gate", "ffn_up"):
            file.tensor(f"{at}.{name}.weight", width, size["ff"], type="Q8_0")
        file.tensor(f"{at}.ffn_down.weight", size["ff"], width, type="Q8_0")
    return file.tensor("output_norm.weight", width)


def data(size: int, *, is_norm: bool, random: np.random.Generator) -> Iterator[bytes]:
    """Yield the bytes of one tensor."""
    if is_norm:
        yield np.ones(size // 4, "<f4").tobytes()
        return
    left = size // BLOCK.itemsize
    while left:
        blocks = np.empty(min(left, CHUNK_BLOCKS), BLOCK)
        blocks["scale"] = SCALE
        blocks["values"] = random.integers(-127, 128, (len(blocks), 32), np.int8)
        left -= len(blocks)
        yield blocks.tobytes()


def write(file: Gguf, path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    head = file.header()
    with path.open("wb") as out:
        out.write(head.ljust(file.padded(len(head)), b"\0"))
        for tensor in file.tensors:
            for chunk in data(tensor.size, is_norm=tensor.name.endswith("norm.weight"), random=random):
                out.write(chunk)
            out.write(b"\0" * (file.padded(tensor.size) - tensor.size))
        out.flush()
        os.fsync(out.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gb", type=float, default=4.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(header(options.vocabulary, options.gb), options.out, options.seed)
    print(f"{options.out}: {options.out.stat().st_size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
