"""Tiny random models with a real tokenizer, enough for llama.cpp's server tests. Runs in the suite's environment.

    python models.py SMOLLM2.gguf VOCAB-BERT-BGE.gguf FOLDER

Deterministic. Writes tiny.gguf (and the same in three shards), tiny-fim.gguf (with fill-in-the-middle tokens),
bge-rnd.gguf, rerank-rnd.gguf, lora-tiny.gguf and mmproj-tiny.gguf.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 128
HEAD = WIDTH // HEADS
random = np.random.default_rng(7)


def noise(*shape: int, scale: float = 0.02) -> Any:
    return random.standard_normal(shape, np.float32) * np.float32(scale)


def half(*shape: int, scale: float) -> Any:
    return noise(*shape, scale=scale).astype(np.float16)


def ones(count: int) -> Any:
    return np.ones(count, np.float32)


def zeros(count: int) -> Any:
    return np.zeros(count, np.float32)


def copy_tokenizer(writer: gguf.GGUFWriter, path: Path) -> int:
    """Returns how many tokens there are."""
    reader = gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    count = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(count)
    return count


def save(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama(
    path: Path,
    tokenizer: Path,
    *,
    shard_tensors: int = 0,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=shard_tensors)
    writer.add_name("tiny")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(1)
    tokens = copy_tokenizer(writer, tokenizer)
    more(writer)
    writer.add_tensor("token_embd.weight", half(tokens, WIDTH, scale=0.5))
    kv = KV_HEADS * HEAD
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    for layer in range(LAYERS):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones(WIDTH))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones(WIDTH))
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", noise(*shape, scale=0.3))
    writer.add_tensor("output_norm.weight", ones(WIDTH))
    writer.add_tensor("output.weight", half(tokens, WIDTH, scale=0.3))
    save(writer)


def with_fim(writer: gguf.GGUFWriter) -> None:
    """Three unused tokens of the vocabulary become the ones for infill."""
    for token, (old, new) in enumerate((("prefix", "pre"), ("suffix", "suf"), ("middle", "mid")), 10):
        writer.add_uint32(f"tokenizer.ggml.{old}_token_id", token)
        writer.add_uint32(f"tokenizer.ggml.fim_{new}_token_id", token)


def bert(path: Path, tokenizer: Path, *, rank: bool = False) -> None:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name(path.stem)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_file_type(1)
    writer.add_pooling_type(gguf.PoolingType.RANK if rank else gguf.PoolingType.CLS)
    tokens = copy_tokenizer(writer, tokenizer)
    writer.add_tensor("token_embd.weight", half(tokens, WIDTH, scale=0.5))
    writer.add_tensor("position_embd.weight", noise(512, WIDTH, scale=0.1))
    writer.add_tensor("token_types.weight", noise(2, WIDTH, scale=0.1))
    writer.add_tensor("token_embd_norm.weight", ones(WIDTH))
    writer.add_tensor("token_embd_norm.bias", zeros(WIDTH))
    for layer in range(LAYERS):
        transformer_layer(writer, f"blk.{layer}.", "attn_q attn_k attn_v attn_output", 0.3)
        for norm in ("attn_output_norm", "layer_output_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones(WIDTH))
            writer.add_tensor(f"blk.{layer}.{norm}.bias", zeros(WIDTH))
    if rank:
        writer.add_array("bert.classifier.output_labels", ["LABEL_0"])
        writer.add_tensor("cls.weight", noise(WIDTH, WIDTH, scale=0.3))
        writer.add_tensor("cls.bias", zeros(WIDTH))
        writer.add_tensor("cls.output.weight", noise(1, WIDTH, scale=0.3))
        writer.add_tensor("cls.output.bias", zeros(1))
    save(writer)


def transformer_layer(writer: gguf.GGUFWriter, prefix: str, attention: str, scale: float) -> None:
    for name in attention.split():
        writer.add_tensor(f"{prefix}{name}.weight", noise(WIDTH, WIDTH, scale=scale))
        writer.add_tensor(f"{prefix}{name}.bias", zeros(WIDTH))
    for name, out, into in (("ffn_up", INNER, WIDTH), ("ffn_down", WIDTH, INNER)):
        writer.add_tensor(f"{prefix}{name}.weight", noise(out, into, scale=scale))
        writer.add_tensor(f"{prefix}{name}.bias", zeros(out))


def lora(path: Path, base: Path) -> None:
    """A random adapter of rank 4 on the queries and the first half of each feed-forward."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_name(path.stem)
    for tensor in gguf.GGUFReader(base).tensors:
        if tensor.name.endswith(("attn_q.weight", "ffn_up.weight")):
            into, out = (int(size) for size in tensor.shape)
            writer.add_tensor(f"{tensor.name}.lora_a", noise(4, into, scale=0.3))
            writer.add_tensor(f"{tensor.name}.lora_b", noise(out, 4, scale=0.3))
    save(writer)


def projector(path: Path, out: int) -> None:
    """A random image projector of the gemma3 kind: 56 × 56 pixels in patches of 14."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_name(path.stem)
    writer.add_file_type(0)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "gemma3")
    sizes = {
        "image_size": 56,
        "patch_size": 14,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "projection_dim": out,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", size)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_bool("clip.use_gelu", True)
    for name in ("mean", "std"):
        writer.add_array(f"clip.vision.image_{name}", [0.5, 0.5, 0.5])
    writer.add_tensor("v.patch_embd.weight", noise(WIDTH, 3, 14, 14))
    writer.add_tensor("v.patch_embd.bias", zeros(WIDTH))
    writer.add_tensor("v.position_embd.weight", noise(16, WIDTH))
    for layer in range(LAYERS):
        transformer_layer(writer, f"v.blk.{layer}.", "attn_q attn_k attn_v attn_out", 0.1)
        for norm in ("ln1", "ln2"):
            writer.add_tensor(f"v.blk.{layer}.{norm}.weight", ones(WIDTH))
            writer.add_tensor(f"v.blk.{layer}.{norm}.bias", zeros(WIDTH))
    writer.add_tensor("v.post_ln.weight", ones(WIDTH))
    writer.add_tensor("v.post_ln.bias", zeros(WIDTH))
    writer.add_tensor("mm.input_projection.weight", noise(WIDTH, out, scale=0.1))
    writer.add_tensor("mm.soft_emb_norm.weight", ones(WIDTH))
    save(writer)


def main(smollm2: Path, bge: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tiny = folder / "tiny.gguf"
    llama(tiny, smollm2)
    llama(folder / "tiny-split.gguf", smollm2, shard_tensors=8)
    llama(folder / "tiny-fim.gguf", smollm2, more=with_fim)
    bert(folder / "bge-rnd.gguf", bge)
    bert(folder / "rerank-rnd.gguf", bge, rank=True)
    lora(folder / "lora-tiny.gguf", tiny)
    projector(folder / "mmproj-tiny.gguf", WIDTH)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
