"""Read the header of a projector: bytes of its tensors, and of the compute buffers that an image takes.

Sources: llama.cpp 0c1e57098, tools/mtmd/clip.cpp (load_hparams, reserve_compute_meta) and the graphs in models/.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path

from msgspec import Struct

from edge.errors import BadModelError
from edge.models.header import Opening, open_by_name, read_header
from edge.models.meta import ModelMeta
from edge.units import MIB

# SigLIP of Gemma 3, for which 220 MiB were measured: the estimate for encoders whose header lacks a size.
_PATCHES, _PATCH, _WIDTH, _INNER, _HEADS = 4096, 14, 1152, 4304, 16
_AUDIO_POSITIONS = 1500  # of 30 s, the window of Whisper's encoder after its strided convolution
# The most tokens of one image where --image-max-tokens sets another (set_limit_image_tokens), and the patches of a side
# that become one token where the header does not state it.
_TOKENS = {
    "pixtral": (1024, 1),
    "kimivl": (1024, 2),
    "kimik25": (4096, 2),
    "lfm2": (256, 2),
    "qwen2vl_merger": (4096, 2),
    "qwen2.5vl_merger": (4096, 2),
    "qwen2.5o": (4096, 2),
    "qwen3vl_merger": (4096, 2),
    "ling3vl": (4096, 2),
    "minimax_m3": (576, 2),
    "muse-glimmer": (4096, 2),
    "glm4v": (4096, 2),
    "gemma4v": (1120, 3),
    "gemma4uv": (1120, 3),
    "hunyuanvl": (16384, 2),
    "youtuvl": (62500, 2),
    "deepseek4v": (384, 3),
}
_LIMIT_OF_FILE = frozenset({"kimik25", "hunyuanvl"})  # image_max_pixels of the header, where it is, counts alone
# An image, or each tile of one, is resized to image_size for these.
_ONE_SIZE = frozenset({"mlp", "ldp", "ldpv2", "resampler", "adapter", "cogvlm", "gemma3", "gemma3nv", "idefics3"})
_ONE_SIZE |= {"internvl", "llama4", "nemotron_v2_vl", "janus_pro", "granite4_vision", "yasa2", "step3vl", "minicpmv4_6"}
_WINDOWED = frozenset({"qwen2.5vl_merger", "qwen2.5o", "exaone4_5"})  # their mask has a value for each pair of patches
_BATCHED = frozenset({"internvl", "deepseekocr", "deepseekocr2"})  # tiles are computed together, see support_batch()
_BATCH_TOKENS = 1024  # common_params::mtmd_batch_max_tokens
# An image of 8192 pixels a side in patches of 8: a header that claims more is not believed.
_MOST_PATCHES, _MOST_WIDTH = 1 << 20, 1 << 16
# Of the warm-up's image, 4 MB before its compression. Published encoders take at most 1540 pixels a side.
_MOST_SIDE_PX = 2048
_FIXED_BYTES = 4 * MIB  # the image itself and its im2col


class Projector(Struct, frozen=True):
    """The encoders of a projector. `tokens` of the largest image is None where --image-max-tokens sets no other."""

    tensor_bytes: int
    patches: int = 0  # of the largest image that the engine takes; 0 without an image encoder
    tokens: int | None = None
    patch_px: int = _PATCH
    patch_bytes: int = 0  # of compute buffer for one patch
    pair_bytes: int = 0  # and for each pair of patches
    heads: int = _HEADS
    images: int = 1  # that are computed together
    audio_bytes: int = 0  # of compute buffer for 30 s of sound

    def patches_of(self, max_tokens: int | None) -> int:
        """Return the patches of the largest image under this limit."""
        if self.tokens is None or max_tokens is None or max_tokens >= self.tokens:
            return self.patches
        return max(1, self.patches * max(1, max_tokens) // self.tokens)

    def compute_bytes(self, max_tokens: int | None = None, *, flash_attention: bool = True) -> int:
        """Return the bytes that the first image of the largest size takes, and the first sound."""
        if not self.patches:
            return self.audio_bytes
        patches = self.patches_of(max_tokens)
        # Without flash attention the scores of one layer are there at once.
        pairs = self.pair_bytes + (0 if flash_attention else 4 * self.heads)
        one = patches * self.patch_bytes + patches * patches * pairs
        return self.audio_bytes + self.images * one + _FIXED_BYTES

    def side_px(self, max_tokens: int | None = None) -> int:
        """Return the side of a square image with as many patches as the limit allows, at most 2048 pixels."""
        return min(_MOST_SIDE_PX, max(1, isqrt(self.patches_of(max_tokens))) * self.patch_px)


def read_projector(path: Path, model: ModelMeta, opening: Opening = open_by_name) -> Projector:
    """Return the projector in a file. Raises BadModelError if there is none, or one for another model."""
    meta = read_header(path, opening=opening)
    if meta.kind != "mmproj":
        raise BadModelError(
            f"{path.name} is a {meta.kind}, not a projector", "give a file whose header has the type mmproj"
        )
    widths = {value for key, value in meta.extra.items() if key.startswith("clip.") and key.endswith(".projection_dim")}
    # The key of some old converters holds the width of CLIP, and Qwen3-VL's outputs are stacked: the shapes decide.
    fits = model.n_embd in widths or any(model.n_embd in tensor.shape for tensor in meta.tensors)
    if widths and model.n_embd and not fits:
        width = ", ".join(map(str, sorted(widths, key=str)))
        raise BadModelError(
            f"{path.name} is a projector for another model: it gives vectors of {width} values, not of {model.n_embd}",
            "take the projector from the repository of the model",
        )
    return projector_of(meta)


def projector_of(meta: ModelMeta) -> Projector:
    """Return the encoders of a header. One that takes any size of image has at least the patches of 896 pixels."""
    sound = meta.extra.get("clip.has_audio_encoder") is True
    audio = _AUDIO_POSITIONS * _row_bytes(meta, "audio") + _FIXED_BYTES if sound else 0
    if sound and meta.extra.get("clip.has_vision_encoder") is not True:
        return Projector(meta.tensor_bytes, audio_bytes=audio)
    kind = str(meta.extra.get("clip.projector_type") or meta.extra.get("clip.vision.projector_type") or "")
    patch = _number(meta, "patch_size") or _PATCH
    patches, tokens = _largest(meta, kind, patch)
    merge = (_number(meta, "projector.scale_factor") or 2) ** 2
    return Projector(
        meta.tensor_bytes,
        patches=patches,
        tokens=tokens,
        patch_px=patch,
        patch_bytes=_row_bytes(meta, "vision"),
        # The mask in f32, in f16, and padded for flash attention.
        pair_bytes=8 if kind in _WINDOWED else 0,
        heads=min(_number(meta, "attention.head_count") or _HEADS, 1 << 10),
        images=max(1, _BATCH_TOKENS * merge // patches) if kind in _BATCHED else 1,
        audio_bytes=audio,
    )


def _largest(meta: ModelMeta, kind: str, patch: int) -> tuple[int, int | None]:
    """Return patches and tokens of the largest image."""
    side = _number(meta, "image_size")
    square = min((side // patch) ** 2, _MOST_PATCHES) if side else 0
    pixels = _number(meta, "image_max_pixels")
    if kind in _TOKENS and not (kind in _LIMIT_OF_FILE and pixels):
        tokens, merge = _TOKENS[kind]
        merge = _number(meta, "spatial_merge_size") or _number(meta, "projector.scale_factor") or merge
        return min(tokens * merge**2, _MOST_PATCHES), tokens
    if kind.startswith("deepseekocr"):
        return 4096, None  # 1024 pixels in patches of 16, whatever the header has
    if kind in _ONE_SIZE:
        return square or _PATCHES, None
    longest = (_number(meta, "preproc_image_size") // patch) ** 2
    return min(max(square, pixels // patch**2, longest, _PATCHES), _MOST_PATCHES), None


def _row_bytes(meta: ModelMeta, encoder: str) -> int:
    """Return the bytes of one position: two rows of the feed-forward and five others."""
    width, inner = (_number(meta, name, encoder) for name in ("embedding_length", "feed_forward_length"))
    return 4 * (2 * min(inner or _INNER, _MOST_WIDTH) + 5 * min(width or _WIDTH, _MOST_WIDTH))


def _number(meta: ModelMeta, name: str, encoder: str = "vision") -> int:
    value = meta.extra.get(f"clip.{encoder}.{name}")
    return value if isinstance(value, int) and value > 0 else 0
