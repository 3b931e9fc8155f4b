"""Files beside a model: projector, LoRA adapters, drafter, template. Checked by header, counted in memory."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from edge.config.values import Preset
from edge.engine.engine import Engine
from edge.errors import BadModelError, ConfigError, ModelMissingError
from edge.models.header import peek_kind, read_header
from edge.models.meta import ModelMeta
from edge.models.open import ModelFile
from edge.models.projector import read_projector
from edge.models.store import Store
from edge.plan.candidates import NOT_DOWNLOADED
from edge.plan.engine_options import adapter
from edge.plan.inputs import Candidate, candidate_of, layer_of
from edge.plan.kv_cache import cache_by_layer, integer
from edge.plan.plan import WARMUP_IMAGE_TOKENS, Images, Settings

# llama.cpp drafts across vocabularies that differ by a few special tokens (SPEC_VOCAB_MAX_SIZE_DIFFERENCE in
# common/speculative.cpp).
_VOCAB_DIFFERENCE = 128


def with_companions(candidate: Candidate, preset: Preset, store: Store) -> Candidate:
    """Return the candidate with the bytes of its companions, and the drafter's path.

    The bytes are counted in the first GPU, or in the host. Raises ConfigError, ModelMissingError, BadModelError.
    """
    _check_texts(preset)
    file = _with_projector(candidate.file, preset.mmproj)
    if preset.lora:
        file = replace(file, adapter_bytes=sum(_adapter_bytes(Path(adapter(each)[0]), file) for each in preset.lora))
    if preset.speculation == "mtp" and not _mtp_layers(file.meta):
        hint = "ngram needs no layers; draft names a second model"
        raise ConfigError(f"speculation: {file.name} has no MTP layers that could draft", hint)
    if preset.draft:
        drafter = _drafter(store, preset.draft, file)
        file = replace(
            file,
            drafter=drafter.path,
            draft_type=_draft_type(drafter, file),
            drafter_bytes=_drafter_bytes(drafter, preset),
        )
    return candidate if file is candidate.file else replace(candidate, file=file)


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


def _drafter(store: Store, ref: str, model: ModelFile) -> ModelFile:
    """Return the file of a drafter whose tokens are those of the model."""
    try:
        found = store.resolve(ref, drafter=True)
    except BadModelError as error:
        raise ConfigError(f"draft: {error}", error.hint) from None
    except ModelMissingError as error:
        raise ModelMissingError(f"draft: {error}", error.hint) from None
    theirs, ours = found.meta, model.meta
    if model.fingerprint == NOT_DOWNLOADED:
        return found  # judged once the model's header is here
    if theirs.kind == "drafter" and not theirs.n_vocab:
        return found  # it computes with the vocabulary of its model
    sizes = (theirs.n_vocab or 0, ours.n_vocab or 0)
    if theirs.tokenizer != ours.tokenizer or abs(sizes[0] - sizes[1]) > _VOCAB_DIFFERENCE:
        raise ConfigError(
            f"draft: {found.name} has another vocabulary ({theirs.tokenizer}, {sizes[0]} tokens) than {model.name} "
            f"({ours.tokenizer}, {sizes[1]} tokens)",
            "a drafter of the same family has the same",
        )
    return found


# By architecture of a drafter that is made for one model: the value of --spec-type, and the key with the width of the
# hidden states that it reads (common/speculative.cpp, src/models/eagle3.cpp, dflash.cpp, gemma4-assistant.cpp).
_DRAFTERS = {
    "eagle3": ("draft-eagle3", "target_hidden_size"),
    "dflash": ("draft-dflash", "embedding_length"),
    "gemma4-assistant": ("draft-mtp", "embedding_length_out"),
}


def _draft_type(drafter: ModelFile, model: ModelFile) -> str:
    """Return the value of --spec-type for a drafter. Raises ConfigError if it is made for another model."""
    meta = drafter.meta
    if meta.kind != "drafter":
        return "draft-simple"
    if meta.arch not in _DRAFTERS:
        raise ConfigError(
            f"draft: {drafter.name} is a drafter of architecture {meta.arch}, which llama.cpp lacks",
            f"it has {', '.join(_DRAFTERS)}, and drafts with any smaller model of the same vocabulary",
        )
    kind, key = _DRAFTERS[meta.arch]
    if model.fingerprint == NOT_DOWNLOADED:
        return kind
    width, ours = integer(meta, key), model.meta.n_embd
    if width and width != ours:
        raise ConfigError(
            f"draft: {drafter.name} is made for a model with {width} values a token, and {model.name} has {ours}",
            "a drafter of this kind is made for one model",
        )
    deepest = integer(meta, "target_layers")
    if deepest > model.meta.n_layer:  # llama.cpp aborts
        raise ConfigError(
            f"draft: {drafter.name} reads layer {deepest} of its model, and {model.name} has {model.meta.n_layer}",
            "a drafter of this kind is made for one model",
        )
    # DSpark is DFlash with a Markov head (common_speculative_types_from_gguf).
    dspark = kind == "draft-dflash" and any(tensor.name == "markov_w1.weight" for tensor in meta.tensors)
    return "draft-dspark" if dspark else kind


def _mtp_layers(meta: ModelMeta) -> int:
    """Return how many of the layers draft; 0 for a header that claims all of them or more."""
    count = integer(meta, "nextn_predict_layers")
    return count if count < meta.n_layer else 0


def with_mtp_layers(candidate: Candidate, preset: Preset) -> Candidate:
    """Return the candidate with the bytes of its MTP layers where they draft: the engine loads them only then."""
    file = candidate.file
    count = _mtp_layers(file.meta)
    if preset.speculation != "mtp" or not count:
        return candidate
    first = file.meta.n_layer - count
    weights = sum(each.bytes for each in file.meta.tensors if (layer_of(each) or 0) >= first)
    # Their context holds as many tokens as the model's (common/speculative.cpp), in f16. Of a hybrid's layers the MTP
    # layers are like those with attention.
    cache = count * max(cache_by_layer(candidate.memory, _drafting(file, preset)))
    return replace(candidate, file=replace(file, drafter_bytes=file.drafter_bytes + weights + cache))


def _drafter_bytes(drafter: ModelFile, preset: Preset) -> int:
    """Return weights and KV cache of the drafter, which has the model's context and slots, in f16."""
    candidate = candidate_of(drafter)
    # All layers of a drafter that is made for a model may count as MTP layers, which `weights` leaves out.
    weights = max(candidate.weights.file_bytes, drafter.meta.tensor_bytes if drafter.meta.kind == "drafter" else 0)
    return weights + sum(cache_by_layer(candidate.memory, _drafting(drafter, preset)))


def _drafting(file: ModelFile, preset: Preset) -> Settings:
    context = (preset.n_ctx or file.meta.n_ctx_train or preset.n_ctx_min) * preset.n_parallel
    return Settings(context, preset.n_parallel, 0, "f16", "f16", "auto", "mmap", 1, 0)
