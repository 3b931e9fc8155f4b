"""Writes projectors in the shapes of published ones, with few layers: the engine computes images with them.

Tensor names and dimensions are those of llama.cpp 0c1e57098, tools/mtmd/clip.cpp (load_hparams, load_tensors).
"""

from __future__ import annotations

from pathlib import Path

from tests.fakes.gguf_writer import Gguf

# Name: projector type, image and patch size, width, feed-forward, heads. The published encoders have these.
SHAPES = {
    "clip": ("mlp", 336, 14, 1024, 4096, 16),  # LLaVA 1.5
    "siglip": ("gemma3", 896, 14, 1152, 4304, 16),  # Gemma 3
    "smolvlm": ("idefics3", 512, 16, 768, 3072, 12),  # SmolVLM2
    "qwen2vl": ("qwen2vl_merger", 560, 14, 1280, 5120, 16),
    "qwen2.5vl": ("qwen2.5vl_merger", 560, 14, 1280, 3420, 16),
    "qwen3vl": ("qwen3vl_merger", 768, 16, 1024, 4096, 16),  # 2B and 4B
}


class _Encoder:
    """A projector in the making."""

    def __init__(self, name: str, n_embd: int, layers: int) -> None:
        self.kind, self.image, self.patch, self.width, self.inner, heads = SHAPES[name]
        self.n_embd, self.layers = n_embd, layers
        self.file = Gguf("clip").set("general.type", "mmproj").set("clip.has_vision_encoder", True)
        self.file.set("clip.projector_type", self.kind).set("clip.use_gelu", True)
        sizes = {"image_size": self.image, "patch_size": self.patch, "block_count": layers, "projection_dim": n_embd}
        widths = {"embedding_length": self.width, "feed_forward_length": self.inner, "attention.head_count": heads}
        for key, value in (sizes | widths).items():
            self.file.set(f"clip.vision.{key}", value)
        self.file.set("clip.vision.attention.layer_norm_epsilon", 1e-6)
        self.file.set("clip.vision.image_mean", [0.5] * 3).set("clip.vision.image_std", [0.5] * 3)

    def linear(self, name: str, inner: int, outer: int) -> None:
        self.file.tensor(f"{name}.weight", inner, outer, type="F16").tensor(f"{name}.bias", outer)

    def norm(self, name: str, width: int) -> None:
        self.file.tensor(f"{name}.weight", width).tensor(f"{name}.bias", width)

    def encoder(self, *, fused: bool = False, gate: bool = False, positions: int = 0) -> None:
        width = self.width
        self.file.tensor("v.patch_embd.weight", self.patch, self.patch, 3, width, type="F16")
        if positions:
            self.file.tensor("v.position_embd.weight", width, positions)
        self.norm("v.post_ln", width)
        for i in range(self.layers):
            block = f"v.blk.{i}"
            for part in ("ln1", "ln2"):
                self.norm(f"{block}.{part}", width)
            if fused:
                self.linear(f"{block}.attn_qkv", width, 3 * width)
            for part in ("attn_out",) if fused else ("attn_q", "attn_k", "attn_v", "attn_out"):
                self.linear(f"{block}.{part}", width, width)
            for part in ("ffn_up", "ffn_gate")[: 1 + gate]:
                self.linear(f"{block}.{part}", width, self.inner)
            self.linear(f"{block}.ffn_down", self.inner, width)

    def two_frames(self) -> None:
        """Add the second kernel of encoders that read pairs of frames."""
        self.file.tensor("v.patch_embd.weight.1", self.patch, self.patch, 3, self.width, type="F16")

    def merger(self, inner: int, hidden: int) -> None:
        self.linear("mm.0", inner, hidden)
        self.linear("mm.2", hidden, self.n_embd)


def write_projector(path: Path, name: str, n_embd: int, *, layers: int = 2) -> Path:
    """Write a projector whose weights are zeros, for a model of `n_embd`."""
    it = _Encoder(name, n_embd, layers)
    width, patches = it.width, (it.image // it.patch) ** 2
    if name == "clip":
        it.encoder(positions=patches + 1)
        it.file.tensor("v.class_embd", width)
        it.norm("v.pre_ln", width)
        it.merger(width, n_embd)
    elif name == "siglip":
        it.encoder(positions=patches)
        it.file.tensor("mm.input_projection.weight", n_embd, width, type="F16")
        it.file.tensor("mm.soft_emb_norm.weight", width)
    elif name == "smolvlm":
        it.encoder(positions=patches)
        it.file.set("clip.vision.projector.scale_factor", 4)
        it.file.tensor("mm.model.fc.weight", 16 * width, n_embd, type="F16")
    elif name == "qwen3vl":
        it.encoder(fused=True, positions=patches)
        it.two_frames()
        it.file.tensor("v.patch_embd.bias", width)
        it.merger(4 * width, 4 * width)
    else:
        it.encoder(gate=name == "qwen2.5vl")
        it.two_frames()
        it.merger(4 * width, 4 * width)
        if name == "qwen2.5vl":
            it.file.set("clip.vision.n_wa_pattern", 2).set("clip.use_gelu", False).set("clip.use_silu", True)
    return it.file.save(path)
