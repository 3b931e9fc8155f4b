"""Files beside a model: projector, LoRA adapters, template. Checked by header, counted in memory."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from edge.config.values import Preset
from edge.engine.engine import Engine
from edge.errors import ConfigError
from edge.models.header import peek_kind, read_header
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile
from edge.models.projector import read_projector
from edge.models.store import Store
from edge.plan.drafters import mtp_layers, with_drafter
from edge.plan.engine_options import adapter
from edge.plan.inputs import Candidate
from edge.plan.plan import WARMUP_IMAGE_TOKENS, Images


def with_companions(candidate: Candidate, preset: Preset, store: Store) -> Candidate:
    """Return the candidate with the bytes of its companions, and its drafter.

    Projector and adapters are counted in the first GPU, or in the host. Raises ConfigError, ModelMissingError,
    BadModelError.
    """
    _check_texts(preset)
    file = _with_projector(candidate.file, preset.mmproj)
    if preset.lora:
        file = replace(file, adapter_bytes=sum(_adapter_bytes(Path(adapter(each)[0]), file) for each in preset.lora))
    if preset.speculation == "mtp" and not mtp_layers(file.meta):
        hint = "ngram needs no layers; draft names a second model"
        raise ConfigError(f"speculation: {file.name} has no MTP layers that could draft", hint)
    candidate = candidate if file is candidate.file else replace(candidate, file=file)
    return with_drafter(candidate, preset, store) if preset.draft else candidate


def _check_texts(preset: Preset) -> None:
    for name in ("chat_template_file", "system_prompt_file"):
        path = getattr(preset, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"{name}: no such file: {path}")


def _with_projector(file: ModelFile, wanted: str) -> ModelFile:
    if wanted == "auto":
        return file
    try:
        path, projector = (None, None) if wanted == "none" else (wanted, read_projector(Path(wanted), file.meta))
    except OSError as error:
        raise ConfigError(f"mmproj: {wanted}: {error.strerror}", "a file, none or auto") from None
    notes = tuple(note for note in file.notes if not note.startswith("no projector is used"))
    return replace(file, mmproj=path, projector=projector, notes=notes)


_ROOM_SHARE = 8  # images are limited to those whose buffers take an eighth of the memory
_LEAST_IMAGE_TOKENS, _IMAGE_TOKENS_STEP = 256, 16


def images_of(
    candidate: Candidate, preset: Preset, flash_attention: str, room_bytes: int, engine: Engine
) -> Images | None:
    """Return the limits of an image in a domain with `room_bytes`; None without a projector for images.

    Qwen2.5-VL takes 2.9 GiB for its largest image, so that a photograph would end an engine on a board of 8 GB.
    """
    projector = candidate.file.projector
    if projector is None or not projector.patches:
        return None
    flash = flash_attention != "off"

    def taken(tokens: int | None) -> int:
        return projector.compute_bytes(tokens, flash_attention=flash)

    requested = image_tokens(preset)
    limit, share_bytes = None, room_bytes // _ROOM_SHARE
    able = engine.kind == "embedded" or engine.has("--image-max-tokens")  # llama-server since November 2025
    if able and requested is None and projector.tokens is not None and taken(None) > share_bytes:
        # In small steps, so that a little more memory never costs more than it adds.
        counts = range(_LEAST_IMAGE_TOKENS, projector.tokens, _IMAGE_TOKENS_STEP)
        limit = counts[max(0, bisect_right(counts, share_bytes, key=taken) - 1)] if counts else None
    counted = requested or limit
    shown = min(counted or WARMUP_IMAGE_TOKENS, WARMUP_IMAGE_TOKENS)
    # An encoder computes as much for a patch as the model for a token, by their weights.
    weights = max(1, candidate.weights.file_bytes)
    like = projector.patches_of(shown) * projector.images * projector.tensor_bytes // weights + shown
    return Images(taken(counted), limit, projector.side_px(shown), like)


def image_tokens(preset: Preset) -> int | None:
    """Return --image-max-tokens of `args`; None where it is absent, or no number, which its check reports."""
    found = [value for name, value in pairwise(preset.args) if name == "--image-max-tokens"]
    return int(found[-1]) if found and found[-1].isdecimal() and int(found[-1]) else None


def _adapter_bytes(path: Path, model: ModelFile) -> int:
    """Return the size of an adapter for this model: llama.cpp refuses one of another architecture when it loads it."""
    if not path.is_file():
        raise ConfigError(f"lora: no such file: {path}", "a LoRA adapter in a .gguf file")
    kind = peek_kind(path)
    if kind != "adapter":
        raise ConfigError(f"lora: {path} is no adapter but a {kind or 'file of another format'}")
    theirs = read_header(path, complete=False)
    if theirs.arch != model.meta.arch:
        raise ConfigError(f"lora: {path} is an adapter for {theirs.arch}, and {model.name} is {model.meta.arch}")
    odd = _misfit(theirs, model.meta)
    if odd is not None:
        raise ConfigError(f"lora: {path} is an adapter for another model than {model.name}: {odd}")
    return path.stat().st_size


def _misfit(adapter_meta: ModelMeta, model: ModelMeta) -> str | None:
    """Return the first tensor of an adapter that its model lacks or has in another shape (src/llama-adapter.cpp)."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    for tensor in adapter_meta.tensors:
        name, _, part = tensor.name.rpartition(".")
        # The two halves of an embedding's adapter are transposed; shapes of one value are left to the engine.
        if part not in ("lora_a", "lora_b") or name.startswith("token_embd"):
            continue
        ours, side = shapes.get(name), 0 if part == "lora_a" else 1
        if ours is None:
            return f"it changes {name}, which the model lacks"
        if len(ours) > side and len(tensor.shape) > side and tensor.shape[side] != ours[side]:
            return f"{name} has {ours[side]} values there and {tensor.shape[side]} in the adapter"
    return None
