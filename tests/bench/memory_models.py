"""Write sparse GGUF files in the shapes of many architectures: the engine allocates for them as for real weights.

Tensor names and dimensions are those of llama.cpp 0c1e57098, src/models/*.cpp (load_arch_tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.fakes.gguf_writer import Gguf

Keys = Mapping[str, Any]


class Model:
    """A GGUF file in the making, with the dimensions that its layers share."""

    def __init__(self, arch: str, type: str, **dims: int) -> None:
        self.arch, self.type = arch, type
        self.embd, self.ff, self.vocab = dims["embd"], dims.get("ff", 4 * dims["embd"]), dims.get("vocab", 32000)
        self.layers, self.heads = dims["layers"], dims["heads"]
        self.kv_heads, self.head = dims.get("kv_heads", dims["heads"]), dims.get("head", dims["embd"] // dims["heads"])
        self.file = Gguf(arch).set("general.type", "model").set("general.name", arch)
        self.file.set("tokenizer.ggml.model", "none")
        self.keys(
            block_count=self.layers,
            context_length=dims.get("ctx", 131072),
            embedding_length=self.embd,
            feed_forward_length=self.ff,
            vocab_size=self.vocab,
            **{
                "attention.head_count": self.heads,
                "attention.key_length": self.head,
                "attention.value_length": self.head,
                "attention.layer_norm_rms_epsilon": 1e-5,
                "rope.dimension_count": self.head,
            },
        )
        self.matrix("token_embd", self.embd, self.vocab)
        self.vector("output_norm", self.embd)
        if not dims.get("tied", 0):
            self.matrix("output", self.embd, self.vocab)

    def keys(self, **keys: Any) -> Model:
        for name, value in keys.items():
            self.file.set(f"{self.arch}.{name}", value)
        return self

    def matrix(self, name: str, *dims: int) -> None:
        self.file.tensor(f"{name}.weight", *dims, type=self.type if dims[0] % 256 == 0 else "F16")

    def vector(self, name: str, *dims: int, suffix: str = ".weight") -> None:
        self.file.tensor(f"{name}{suffix}", *dims)

    def attention(self, i: int, *, queries: int | None = None, head: int | None = None) -> None:
        head = head or self.head
        queries, keys = queries or self.heads * head, self.kv_heads * head
        self.matrix(f"blk.{i}.attn_q", self.embd, queries)
        self.matrix(f"blk.{i}.attn_k", self.embd, keys)
        self.matrix(f"blk.{i}.attn_v", self.embd, keys)
        self.matrix(f"blk.{i}.attn_output", self.heads * head, self.embd)

    def norms(self, i: int, *names: str) -> None:
        for name in names:
            self.vector(f"blk.{i}.{name}", self.embd)

    def head_norms(self, i: int, size: int) -> None:
        self.vector(f"blk.{i}.attn_q_norm", size)
        self.vector(f"blk.{i}.attn_k_norm", size)

    def feed_forward(self, i: int, *, gate: bool = True, width: int = 1) -> None:
        if gate:
            self.matrix(f"blk.{i}.ffn_gate", self.embd, self.ff)
        self.matrix(f"blk.{i}.ffn_up", self.embd, width * self.ff)
        self.matrix(f"blk.{i}.ffn_down", self.ff, self.embd)

    def experts(self, i: int, count: int, ff: int) -> None:
        self.vector(f"blk.{i}.ffn_gate_inp", self.embd, count)
        self.matrix(f"blk.{i}.ffn_gate_exps", self.embd, ff, count)
        self.matrix(f"blk.{i}.ffn_up_exps", self.embd, ff, count)
        self.matrix(f"blk.{i}.ffn_down_exps", ff, self.embd, count)


def dense(arch: str, type: str = "Q8_0", **dims: int) -> Model:
    """llama, qwen2, qwen3, phi3, gemma2, gemma3, olmo2, glm4."""
    window = dims.pop("window", 0)
    it = Model(arch, type, **dims)
    it.keys(**{"attention.head_count_kv": it.kv_heads}, **({"attention.sliding_window": window} if window else {}))
    for i in range(it.layers):
        it.attention(i)
        it.norms(i, *({"olmo2": ()}.get(arch, ("attn_norm", "ffn_norm"))))
        if arch == "qwen2":
            for part, size in (("q", it.heads), ("k", it.kv_heads), ("v", it.kv_heads)):
                it.vector(f"blk.{i}.attn_{part}", size * it.head, suffix=".bias")
        if arch in ("qwen3", "gemma3"):
            it.head_norms(i, it.head)
        if arch == "olmo2":
            it.vector(f"blk.{i}.attn_q_norm", it.embd)
            it.vector(f"blk.{i}.attn_k_norm", it.kv_heads * it.head)
        if arch in ("gemma2", "gemma3", "olmo2", "glm4"):
            it.norms(i, "post_attention_norm", "post_ffw_norm")
        fused = arch in ("phi3", "glm4")
        it.feed_forward(i, gate=not fused, width=2 if fused else 1)
    return it


def mixture(arch: str, type: str = "Q8_0", **dims: int) -> Model:
    """qwen3moe, qwen2moe (with a shared expert), gpt-oss."""
    count, used, ff, shared = dims.pop("count"), dims.pop("used"), dims.pop("expert_ff"), dims.pop("shared", 0)
    it = Model(arch, type, **dims)
    it.keys(expert_count=count, expert_used_count=used, expert_feed_forward_length=ff)
    it.keys(**{"attention.head_count_kv": it.kv_heads})
    if shared:
        it.keys(expert_shared_feed_forward_length=shared)
    if arch == "gpt-oss":
        it.keys(**{"attention.sliding_window": 128})
    for i in range(it.layers):
        it.attention(i)
        it.norms(i, "attn_norm", "post_attention_norm" if arch == "gpt-oss" else "ffn_norm")
        it.experts(i, count, ff)
        if arch == "qwen3moe":
            it.head_norms(i, it.head)
        if arch == "qwen2moe":
            for part, size in (("q", it.heads), ("k", it.kv_heads), ("v", it.kv_heads)):
                it.vector(f"blk.{i}.attn_{part}", size * it.head, suffix=".bias")
            it.vector(f"blk.{i}.ffn_gate_inp_shexp", it.embd)
            it.matrix(f"blk.{i}.ffn_gate_shexp", it.embd, shared)
            it.matrix(f"blk.{i}.ffn_up_shexp", it.embd, shared)
            it.matrix(f"blk.{i}.ffn_down_shexp", shared, it.embd)
        if arch == "gpt-oss":
            it.vector(f"blk.{i}.attn_sinks", it.heads)
            for part, size in (("q", it.heads), ("k", it.kv_heads), ("v", it.kv_heads)):
                it.vector(f"blk.{i}.attn_{part}", size * it.head, suffix=".bias")
            it.vector(f"blk.{i}.attn_output", it.embd, suffix=".bias")
            it.vector(f"blk.{i}.ffn_gate_inp", count, suffix=".bias")
            for part, size in (("gate", ff), ("down", it.embd), ("up", ff)):
                it.vector(f"blk.{i}.ffn_{part}_exps", size, count, suffix=".bias")
    return it


def latent(type: str = "Q8_0", **dims: int) -> Model:
    """deepseek2 with multi-head latent attention: one row of 512 + 64 values a cell."""
    count, used, ff = dims.pop("count"), dims.pop("used"), dims.pop("expert_ff")
    lora, rope, nope, value, q_lora = 512, 64, 128, 128, 768
    it = Model("deepseek2", type, **{**dims, "head": lora + rope})
    it.keys(
        leading_dense_block_count=1,
        expert_count=count,
        expert_used_count=used,
        expert_feed_forward_length=ff,
        expert_shared_count=1,
        expert_weights_scale=1.0,
        **{
            "attention.head_count_kv": 1,
            "attention.value_length": lora,
            "attention.key_length_mla": rope + nope,
            "attention.value_length_mla": value,
            "attention.q_lora_rank": q_lora,
            "attention.kv_lora_rank": lora,
            "rope.dimension_count": rope,
        },
    )
    for i in range(it.layers):
        it.norms(i, "attn_norm", "ffn_norm")
        it.vector(f"blk.{i}.attn_q_a_norm", q_lora)
        it.vector(f"blk.{i}.attn_kv_a_norm", lora)
        it.matrix(f"blk.{i}.attn_q_a", it.embd, q_lora)
        it.matrix(f"blk.{i}.attn_q_b", q_lora, it.heads * (rope + nope))
        it.matrix(f"blk.{i}.attn_kv_a_mqa", it.embd, lora + rope)
        it.matrix(f"blk.{i}.attn_k_b", nope, lora, it.heads)
        it.matrix(f"blk.{i}.attn_v_b", lora, value, it.heads)
        it.matrix(f"blk.{i}.attn_output", it.heads * value, it.embd)
        if i == 0:
            it.feed_forward(i)
        else:
            it.experts(i, count, ff)
            it.matrix(f"blk.{i}.ffn_gate_shexp", it.embd, ff)
            it.matrix(f"blk.{i}.ffn_up_shexp", it.embd, ff)
            it.matrix(f"blk.{i}.ffn_down_shexp", ff, it.embd)
    return it


def state_space(arch: str, type: str = "Q8_0", **dims: int) -> Model:
    """mamba, mamba2, falcon-h1 (attention beside the state), granitehybrid (attention in every fourth layer)."""
    state, groups, conv = dims.pop("state", 128), dims.pop("groups", 1), 4
    it = Model(arch, type, **dims)
    inner, rank = 2 * it.embd, dims.get("rank", it.embd // 16 if arch == "mamba" else 2 * it.embd // 64)
    every = {"mamba": 0, "mamba2": 0, "falcon-h1": 1, "granitehybrid": 4}[arch]
    attends = [bool(every) and (i + 1) % every == 0 for i in range(it.layers)]
    it.keys(
        **{
            "ssm.conv_kernel": conv,
            "ssm.inner_size": inner,
            "ssm.state_size": state,
            "ssm.time_step_rank": rank,
            "ssm.group_count": 0 if arch == "mamba" else groups,
            "attention.head_count_kv": [it.kv_heads if yes else 0 for yes in attends] if every else 0,
        }
    )
    for i in range(it.layers):
        it.norms(i, "attn_norm", *(() if every == 0 or arch == "falcon-h1" else ("ffn_norm",)))
        if arch == "falcon-h1":
            it.vector(f"blk.{i}.ffn_norm", it.embd, suffix="")
        if arch == "mamba":
            it.matrix(f"blk.{i}.ssm_in", it.embd, 2 * inner)
            it.vector(f"blk.{i}.ssm_conv1d", conv, inner)
            it.vector(f"blk.{i}.ssm_conv1d", inner, suffix=".bias")
            it.matrix(f"blk.{i}.ssm_x", inner, rank + 2 * state)
            it.matrix(f"blk.{i}.ssm_dt", rank, inner)
            it.vector(f"blk.{i}.ssm_dt", inner, suffix=".bias")
            it.vector(f"blk.{i}.ssm_a", state, inner, suffix="")
            it.vector(f"blk.{i}.ssm_d", inner, suffix="")
            it.matrix(f"blk.{i}.ssm_out", inner, it.embd)
        elif arch in ("mamba2", "falcon-h1") or not attends[i]:
            channels = inner + 2 * groups * state
            it.matrix(f"blk.{i}.ssm_in", it.embd, inner + channels + rank)
            it.vector(f"blk.{i}.ssm_conv1d", conv, channels)
            it.vector(f"blk.{i}.ssm_conv1d", channels, suffix=".bias")
            it.vector(f"blk.{i}.ssm_dt", rank, suffix=".bias")
            it.vector(f"blk.{i}.ssm_a", 1, rank, suffix="")
            it.vector(f"blk.{i}.ssm_d", 1, rank, suffix="")
            it.vector(f"blk.{i}.ssm_norm", inner // groups, groups)
            it.matrix(f"blk.{i}.ssm_out", inner, it.embd)
        if attends[i]:
            it.attention(i)
        if every:
            it.feed_forward(i)
    return it


def delta(type: str = "Q8_0", **dims: int) -> Model:
    """qwen35: gated delta net, with attention in every fourth layer."""
    it = Model("qwen35", type, **dims)
    state, groups, rank, conv = 128, 16, 32, 4
    key_dim, value_dim = state * groups, state * rank
    it.keys(
        full_attention_interval=4,
        **{
            "attention.head_count_kv": it.kv_heads,
            "rope.dimension_sections": [11, 11, 10, 0],
            "rope.dimension_count": 64,
            "ssm.conv_kernel": conv,
            "ssm.inner_size": value_dim,
            "ssm.state_size": state,
            "ssm.time_step_rank": rank,
            "ssm.group_count": groups,
        },
    )
    for i in range(it.layers):
        it.norms(i, "attn_norm", "post_attention_norm")
        if (i + 1) % 4 == 0:
            it.attention(i, queries=2 * it.heads * it.head)
            it.head_norms(i, it.head)
        else:
            it.matrix(f"blk.{i}.attn_qkv", it.embd, 2 * key_dim + value_dim)
            it.matrix(f"blk.{i}.attn_gate", it.embd, value_dim)
            it.vector(f"blk.{i}.ssm_conv1d", conv, 2 * key_dim + value_dim)
            it.vector(f"blk.{i}.ssm_dt", rank, suffix=".bias")
            it.vector(f"blk.{i}.ssm_a", rank, suffix="")
            it.matrix(f"blk.{i}.ssm_beta", it.embd, rank)
            it.matrix(f"blk.{i}.ssm_alpha", it.embd, rank)
            it.vector(f"blk.{i}.ssm_norm", state)
            it.matrix(f"blk.{i}.ssm_out", value_dim, it.embd)
        it.feed_forward(i)
    return it


def gemma4(type: str = "Q8_0", **dims: int) -> Model:
    """Windowed layers with smaller heads, shared caches in the last layers, embeddings per layer."""
    per_layer, shared = dims.pop("per_layer", 256), dims.pop("shared", 6)
    it = Model("gemma4", type, **dims)
    windowed = [(i + 1) % 6 != 0 for i in range(it.layers)]
    small = it.head // 2
    it.keys(
        embedding_length_per_layer_input=per_layer,
        **{
            "attention.head_count_kv": it.kv_heads,
            "attention.sliding_window": 512,
            "attention.sliding_window_pattern": windowed,
            "attention.key_length_swa": small,
            "attention.value_length_swa": small,
            "attention.shared_kv_layers": shared,
            "rope.dimension_count_swa": small,
        },
    )
    it.matrix("per_layer_token_embd", per_layer * it.layers, it.vocab)
    it.matrix("per_layer_model_proj", it.embd, per_layer * it.layers)
    it.vector("per_layer_proj_norm", per_layer)
    it.vector("rope_freqs", it.head // 2)
    for i in range(it.layers):
        head = small if windowed[i] else it.head
        it.norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
        it.attention(i, head=head)
        it.head_norms(i, head)
        it.feed_forward(i)
        it.matrix(f"blk.{i}.inp_gate", it.embd, per_layer)
        it.matrix(f"blk.{i}.proj", per_layer, it.embd)
    return it


SMALL = {"embd": 512, "layers": 8, "heads": 8, "kv_heads": 2, "ff": 1536}
WIDE = {"embd": 2048, "layers": 6, "heads": 16, "kv_heads": 8, "ff": 6144, "vocab": 128256}

MODELS: dict[str, Callable[[], Model]] = {
    "llama": lambda: dense("llama", **SMALL),
    "llama-wide": lambda: dense("llama", "Q4_K", **WIDE),
    "llama-tied": lambda: dense("llama", **SMALL, tied=1),
    "llama-many-heads": lambda: dense("llama", **{**SMALL, "heads": 32, "kv_heads": 32, "head": 64}),
    "llama-q4_0": lambda: dense("llama", "Q4_0", **WIDE),
    "llama-q6_k": lambda: dense("llama", "Q6_K", **WIDE),
    "llama-f16": lambda: dense("llama", "F16", **SMALL),
    "qwen2": lambda: dense("qwen2", **SMALL),
    "qwen2-wide": lambda: dense("qwen2", "Q5_K", **WIDE),
    "qwen3": lambda: dense("qwen3", **{**SMALL, "head": 128}, tied=1),
    "qwen3-wide": lambda: dense("qwen3", "Q4_K", **WIDE),
    "phi3": lambda: dense("phi3", **{**SMALL, "kv_heads": 8}),
    "gemma2": lambda: dense("gemma2", **{**SMALL, "head": 256, "vocab": 256000}, window=4096, tied=1),
    "gemma3": lambda: dense("gemma3", **{**SMALL, "layers": 12, "head": 256, "kv_heads": 1}, window=512, tied=1),
    "gemma3-wide": lambda: dense("gemma3", **{**WIDE, "head": 256, "vocab": 262144}, window=1024, tied=1),
    "olmo2": lambda: dense("olmo2", **SMALL),
    "glm4": lambda: dense("glm4", **SMALL),
    "qwen3moe": lambda: mixture("qwen3moe", **{**SMALL, "head": 128}, count=64, used=8, expert_ff=256),
    "qwen3moe-wide": lambda: mixture("qwen3moe", "Q4_K", **{**WIDE, "layers": 3}, count=32, used=8, expert_ff=768),
    "qwen3moe-many-used": lambda: mixture("qwen3moe", **SMALL, count=32, used=16, expert_ff=512),
    "qwen2moe": lambda: mixture("qwen2moe", **SMALL, count=32, used=4, expert_ff=512, shared=2048),
    "gpt-oss": lambda: mixture("gpt-oss", **{**SMALL, "head": 64}, count=32, used=4, expert_ff=512),
    "gpt-oss-wide": lambda: mixture("gpt-oss", **{**WIDE, "head": 64, "layers": 4}, count=16, used=4, expert_ff=2048),
    "deepseek2": lambda: latent(**SMALL, count=16, used=4, expert_ff=256),
    "deepseek2-wide": lambda: latent("Q4_K", **{**WIDE, "layers": 4}, count=16, used=6, expert_ff=1024),
    "mamba": lambda: state_space("mamba", **SMALL, state=16),
    "mamba2": lambda: state_space("mamba2", **SMALL),
    "mamba2-wide": lambda: state_space("mamba2", **WIDE, groups=8),
    "falcon-h1": lambda: state_space("falcon-h1", **SMALL),
    "falcon-h1-wide": lambda: state_space("falcon-h1", "Q5_K", **WIDE),
    "granitehybrid": lambda: state_space("granitehybrid", **SMALL),
    "qwen35": lambda: delta(**{**SMALL, "head": 256}),
    "qwen35-wide": lambda: delta("Q4_K", **{**WIDE, "head": 256, "kv_heads": 4, "layers": 8}),
    "gemma4": lambda: gemma4(**{**SMALL, "layers": 12, "head": 512, "kv_heads": 1, "vocab": 64000}, tied=1),
    "gemma4-wide": lambda: gemma4(**{**WIDE, "layers": 12, "head": 512, "kv_heads": 2}, tied=1),
}


def write_model(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    if not path.exists():
        MODELS[name]().file.save_sparse(path)
    return path
