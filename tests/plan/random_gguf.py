"""Writes GGUF files of a chosen shape with random weights and a real tokenizer, for the real engine to load.

Built with the `gguf` package. The tokenizer is copied from a real file. The weights are small random numbers: the
engine loads them and answers nonsense, which is enough to see what it allocates.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from msgspec import Struct

_SHORT_CONV = 3  # LFM2's convolution kernel
_KNOWN = ("bert", "llama", "deci", "lfm2", "qwen3", "qwen3moe", "gemma3", "glm4moe")


class Shape(Struct, frozen=True):
    """A model. `kv_heads` may differ by layer; `experts` (all, used) makes the feed-forward a mixture.

    `mtp`: how many of the layers, the last ones, predict a further token (glm4moe).
    """

    arch: str = "llama"
    layers: int = 4
    embd: int = 256
    heads: int = 4
    kv_heads: int | tuple[int, ...] = 4
    head_size: int = 64
    ff: int = 1024
    experts: tuple[int, int] = (0, 0)
    mtp: int = 0
    ctx: int = 8192
    window: int = 0
    tied: bool = False
    pooling: gguf.PoolingType | None = None
    type: Type = Type.F16

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads if isinstance(self.kv_heads, int) else self.kv_heads[layer]


def write(path: Path, shape: Shape, vocab: Path) -> Path:
    """Raises ValueError for an architecture that it cannot write."""
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(path.stem)
    writer.add_context_length(shape.ctx)
    writer.add_embedding_length(shape.embd)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads if isinstance(shape.kv_heads, int) else list(shape.kv_heads))
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.pooling:
        writer.add_pooling_type(shape.pooling)
    if shape.arch == "bert":
        writer.add_causal_attention(False)
        writer.add_layer_norm_eps(1e-5)
        writer.add_token_type_count(2)
    if shape.arch == "lfm2":
        writer.add_shortconv_l_cache(_SHORT_CONV)
    if shape.experts[0]:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
        writer.add_expert_feed_forward_length(shape.ff)
    if shape.arch == "glm4moe":
        writer.add_expert_shared_count(1)
        writer.add_nextn_predict_layers(shape.mtp)
    n_vocab = copy_tokenizer(writer, vocab)
    random = np.random.default_rng(1)
    for name, dims in _tensors(shape, n_vocab):
        values = (random.standard_normal(dims, np.float32) * 0.02).astype(np.float32)
        if len(dims) == 1:
            writer.add_tensor(name, np.ones(dims, np.float32))
        elif "shortconv.conv" in name:
            writer.add_tensor(name, values)
        elif shape.type == Type.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, shape.type), raw_dtype=shape.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def copy_tokenizer(writer: gguf.GGUFWriter, vocab: Path) -> int:
    """Copy the tokenizer of a real file; return the number of its tokens."""
    fields = _tokenizer(vocab)
    for key, value, kind, inner in fields:
        writer.add_key_value(key, value, kind, inner)
    return next(len(value) for key, value, _kind, _inner in fields if key == "tokenizer.ggml.tokens")


@functools.lru_cache(maxsize=1)
def _tokenizer(vocab: Path) -> list[tuple[str, Any, Any, Any]]:
    fields = []
    for key, field in gguf.GGUFReader(vocab).fields.items():
        if key.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            fields.append((key, field.contents(), field.types[0], inner))
    return fields


def _tensors(shape: Shape, n_vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and (rows, columns) in llama.cpp's names."""
    if shape.arch == "bert":
        return _encoder(shape, n_vocab)
    tensors: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (n_vocab, shape.embd))]
    for layer in range(shape.layers):
        tensors += [(f"blk.{layer}.{name}", dims) for name, dims in _layer(shape, layer)]
    tensors.append(("token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight", (shape.embd,)))
    if not shape.tied:
        tensors.append(("output.weight", (n_vocab, shape.embd)))
    if shape.pooling == gguf.PoolingType.RANK:
        tensors.append(("cls.output.weight", (1, shape.embd)))
    return tensors


def _encoder(shape: Shape, n_vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    width = shape.embd
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (n_vocab, width)),
        ("token_types.weight", (2, width)),
        ("position_embd.weight", (shape.ctx, width)),
        ("token_embd_norm.weight", (width,)),
        ("token_embd_norm.bias", (width,)),
    ]
    for layer in range(shape.layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors += [(f"blk.{layer}.{name}.weight", (width, width)), (f"blk.{layer}.{name}.bias", (width,))]
        tensors += [(f"blk.{layer}.ffn_up.weight", (shape.ff, width)), (f"blk.{layer}.ffn_up.bias", (shape.ff,))]
        tensors += [(f"blk.{layer}.ffn_down.weight", (width, shape.ff)), (f"blk.{layer}.ffn_down.bias", (width,))]
        for name in ("attn_output_norm", "layer_output_norm"):
            tensors += [(f"blk.{layer}.{name}.weight", (width,)), (f"blk.{layer}.{name}.bias", (width,))]
    return tensors


def _layer(shape: Shape, layer: int) -> list[tuple[str, tuple[int, ...]]]:
    size, queries, keys = shape.head_size, shape.heads * shape.head_size, shape.kv_heads_of(layer) * shape.head_size
    norm = "post_attention_norm" if shape.arch == "glm4moe" else "ffn_norm"
    names: list[tuple[str, tuple[int, ...]]] = [("attn_norm.weight", (shape.embd,)), (f"{norm}.weight", (shape.embd,))]
    if keys:
        names += [
            ("attn_q.weight", (queries, shape.embd)),
            ("attn_k.weight", (keys, shape.embd)),
            ("attn_v.weight", (keys, shape.embd)),
            ("attn_output.weight", (shape.embd, queries)),
        ]
    else:  # a convolution instead of attention
        names += [
            ("shortconv.conv.weight", (shape.embd, _SHORT_CONV)),
            ("shortconv.in_proj.weight", (3 * shape.embd, shape.embd)),
            ("shortconv.out_proj.weight", (shape.embd, shape.embd)),
        ]
    if keys and shape.arch in ("qwen3", "qwen3moe", "gemma3", "lfm2"):
        names += [("attn_q_norm.weight", (size,)), ("attn_k_norm.weight", (size,))]
    if shape.arch == "gemma3":
        names += [("post_attention_norm.weight", (shape.embd,)), ("post_ffw_norm.weight", (shape.embd,))]
    if shape.arch not in _KNOWN:
        raise ValueError(f"cannot write {shape.arch}")
    every, _used = shape.experts
    if shape.arch == "glm4moe":
        names += [("exp_probs_b.bias", (every,)), ("ffn_down_shexp.weight", (shape.embd, shape.ff))]
        names += [(f"ffn_{part}_shexp.weight", (shape.ff, shape.embd)) for part in ("gate", "up")]
        if layer >= shape.layers - shape.mtp:
            names += [("nextn.eh_proj.weight", (shape.embd, 2 * shape.embd))]
            names += [(f"nextn.{name}.weight", (shape.embd,)) for name in ("enorm", "hnorm", "shared_head_norm")]
    if every:
        return [
            *names,
            ("ffn_gate_inp.weight", (every, shape.embd)),
            *((f"ffn_{part}_exps.weight", (every, shape.ff, shape.embd)) for part in ("gate", "up")),
            ("ffn_down_exps.weight", (every, shape.embd, shape.ff)),
        ]
    return [
        *names,
        *((f"ffn_{part}.weight", (shape.ff, shape.embd)) for part in ("gate", "up")),
        ("ffn_down.weight", (shape.embd, shape.ff)),
    ]
