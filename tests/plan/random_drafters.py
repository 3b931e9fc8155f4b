"""Writes drafters that are made for one model, and a small Gemma 4, with random weights and a real tokenizer.

Names and dimensions are those of llama.cpp 0c1e57098, src/models: eagle3.cpp, dflash.cpp, gemma4-assistant.cpp,
gemma4.cpp. What they draft is mostly wrong, which shows that the engine loads them, asks them and checks their drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from tests.plan.random_gguf import copy_tokenizer

HEADS, HEAD_SIZE = 2, 64
WIDE = HEADS * HEAD_SIZE
Tensors = dict[str, tuple[int, ...]]  # (rows, columns)


def write_eagle3(path: Path, vocab: Path, *, target_embd: int, target_layers: Sequence[int]) -> Path:
    """Write an EAGLE-3 drafter for a model of that width."""
    embd = 128
    writer, n_vocab = _begun(path, "eagle3", vocab, embd)
    writer.add_array("eagle3.target_layers", list(target_layers))
    writer.add_uint32("eagle3.target_hidden_size", target_embd)
    tensors: Tensors = {
        "fc": (embd, len(target_layers) * target_embd),
        "token_embd": (n_vocab, embd),
        "output": (n_vocab, embd),
        "output_norm": (embd,),
        "blk.0.attn_norm_2": (embd,),
        **_block(embd, embd_in=2 * embd),
    }
    return _ended(path, writer, tensors)


def write_dflash(
    path: Path, vocab: Path, *, target_embd: int, target_layers: Sequence[int], markov_rank: int = 0
) -> Path:
    """Write a DFlash drafter for a model of that width, whose tables it uses; with a Markov head it is DSpark."""
    embd = target_embd
    writer, n_vocab = _begun(path, "dflash", vocab, embd, mask_token=True)
    writer.add_array("dflash.target_layers", list(target_layers))
    writer.add_uint32("dflash.block_size", 8)
    tensors: Tensors = {
        "fc": (embd, len(target_layers) * embd),
        "enc.output_norm": (embd,),
        "output_norm": (embd,),
        **_block(embd),
        "blk.0.attn_q_norm": (HEAD_SIZE,),
        "blk.0.attn_k_norm": (HEAD_SIZE,),
    }
    if markov_rank:
        tensors |= dict.fromkeys(("markov_w1", "markov_w2"), (n_vocab, markov_rank))
        tensors |= {"conf_proj": (1, embd + markov_rank)}
    return _ended(path, writer, tensors)


def write_assistant(path: Path, vocab: Path, *, target_embd: int) -> Path:
    """Write an assistant of a Gemma 4 of that width: two layers, which read the KV cache of its last two."""
    embd, layers = 96, 2
    writer, n_vocab = _begun(path, "gemma4-assistant", vocab, embd, layers=layers)
    _gemma(writer, window=(True, False))
    writer.add_uint32("gemma4-assistant.embedding_length_out", target_embd)
    writer.add_nextn_predict_layers(layers)
    tensors: Tensors = {
        "token_embd": (n_vocab, embd),
        "output_norm": (embd,),
        "nextn.pre_projection": (embd, 2 * target_embd),
        "nextn.post_projection": (target_embd, embd),
    }
    for layer in range(layers):
        block = _block(embd, layer) | _gemma_norms(embd, layer)
        tensors |= {name: dims for name, dims in block.items() if not name.endswith((".attn_k", ".attn_v"))}
    return _ended(path, writer, tensors)


def write_gemma4(path: Path, vocab: Path, *, embd: int = 128) -> Path:
    """Write a dense Gemma 4 of four layers, every second one with a window."""
    writer, n_vocab = _begun(path, "gemma4", vocab, embd, layers=4)
    _gemma(writer, window=(True, False, True, False))
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    tensors: Tensors = {"token_embd": (n_vocab, embd), "output_norm": (embd,)}
    for layer in range(4):
        tensors |= _block(embd, layer) | _gemma_norms(embd, layer)
        tensors |= {f"blk.{layer}.attn_k_norm": (HEAD_SIZE,)}
    return _ended(path, writer, tensors)


def _block(embd: int, layer: int = 0, *, embd_in: int = 0) -> Tensors:
    """A transformer layer whose feed-forward is as wide as its input."""
    named: Tensors = {
        **dict.fromkeys(("attn_norm", "ffn_norm"), (embd,)),
        **dict.fromkeys(("attn_q", "attn_k", "attn_v"), (WIDE, embd_in or embd)),
        **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (embd, embd)),
        "attn_output": (embd, WIDE),
    }
    return {f"blk.{layer}.{name}": dims for name, dims in named.items()}


def _gemma_norms(embd: int, layer: int) -> Tensors:
    norms = ("post_attention_norm", "post_ffw_norm")
    more: Tensors = {**dict.fromkeys(norms, (embd,)), "attn_q_norm": (HEAD_SIZE,), "layer_output_scale": (1,)}
    return {"rope_freqs": (HEAD_SIZE // 2,), **{f"blk.{layer}.{name}": dims for name, dims in more.items()}}


def _gemma(writer: gguf.GGUFWriter, window: Sequence[bool]) -> None:
    writer.add_sliding_window(512)
    writer.add_array(f"{writer.arch}.attention.sliding_window_pattern", list(window))
    for name in ("key_length_swa", "value_length_swa"):
        writer.add_uint32(f"{writer.arch}.attention.{name}", HEAD_SIZE)


def _begun(
    path: Path, arch: str, vocab: Path, embd: int, *, layers: int = 1, mask_token: bool = False
) -> tuple[gguf.GGUFWriter, int]:
    """Return the writer and the number of tokens."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(path.stem)
    writer.add_context_length(8192)
    writer.add_embedding_length(embd)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(embd)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    n_vocab = copy_tokenizer(writer, vocab)
    if mask_token:  # of a block, the positions to fill
        writer.add_mask_token_id(n_vocab - 1)
    return writer, n_vocab


def _ended(path: Path, writer: gguf.GGUFWriter, tensors: Tensors) -> Path:
    random = np.random.default_rng(1)
    for name, dims in tensors.items():
        values = (random.standard_normal(dims, np.float32) * 0.02).astype(np.float16)
        writer.add_tensor(f"{name}.weight", values if len(dims) > 1 else np.ones(dims, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
