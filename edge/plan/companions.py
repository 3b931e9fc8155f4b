"""Files beside a model: projector, LoRA adapters, template, drafter. Checked by header, counted in memory, placed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
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
from edge.plan.engine_options import SIMPLE_DRAFT, adapter
from edge.plan.inputs import Candidate, PlanInputs, candidate_of, layer_of
from edge.plan.kv_cache import cache_by_layer, integer
from edge.plan.plan import WARMUP_IMAGE_TOKENS, Images, Settings


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


# Drafters and MTP layers: compared with their model, and put on a GPU or the CPU.

# llama.cpp drafts across vocabularies that differ by a few special tokens (SPEC_VOCAB_MAX_SIZE_DIFFERENCE in
# common/speculative.cpp).
_VOCAB_DIFFERENCE = 128


def with_drafter(candidate: Candidate, preset: Preset, store: Store) -> Candidate:
    """Return the candidate with the drafter of the key `draft`. Raises ConfigError, ModelMissingError."""
    file = candidate.file
    found = _resolved(store, preset.draft, file)
    file = replace(file, drafter=found.path, draft_type=_draft_type(found, file))
    drafted = replace(candidate, file=file, drafter=candidate_of(found))
    return _with_draft_bytes(drafted, preset)


def _resolved(store: Store, ref: str, model: ModelFile) -> ModelFile:
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
        return SIMPLE_DRAFT
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


def mtp_layers(meta: ModelMeta) -> int:
    """Return how many of the layers draft; 0 for a header that claims all of them or more."""
    count = integer(meta, "nextn_predict_layers")
    return count if count < meta.n_layer else 0


def with_mtp_layers(candidate: Candidate, preset: Preset) -> Candidate:
    """Return the candidate with its MTP layers where they draft: the engine loads them only then."""
    count = mtp_layers(candidate.file.meta)
    if preset.speculation != "mtp" or not count:
        return candidate
    return _with_draft_bytes(replace(candidate, mtp_layers=count), preset)


def _with_draft_bytes(candidate: Candidate, preset: Preset) -> Candidate:
    """Return the candidate with the bytes of what drafts, at the requested context."""
    context = (preset.n_ctx or candidate.file.meta.n_ctx_train or preset.n_ctx_min) * preset.n_parallel
    settings = Settings(context, preset.n_parallel, 0, "f16", "f16", "auto", "mmap", 1, 0)
    size = drafter_bytes(candidate, settings) + mtp_bytes(candidate, settings)
    return replace(candidate, file=replace(candidate.file, drafter_bytes=size))


def drafting(settings: Settings) -> Settings:
    """Return the settings of the context that drafts: as many tokens and slots as the model's, in f16.

    Source: common_speculative_init_result in common/speculative.cpp.
    """
    return replace(settings, kv_type_k="f16", kv_type_v="f16", images=None)


def drafter_bytes(candidate: Candidate, settings: Settings) -> int:
    """Return weights and KV cache of the drafter beside a model with these settings."""
    drafter = candidate.drafter
    if drafter is None:
        return 0
    # All layers of a drafter that is made for a model may count as MTP layers, which `weights` leaves out.
    meta = drafter.file.meta
    weights = max(drafter.weights.file_bytes, meta.tensor_bytes if meta.kind == "drafter" else 0)
    return weights + sum(cache_by_layer(drafter.memory, drafting(settings)))


def mtp_bytes(candidate: Candidate, settings: Settings) -> int:
    """Return weights and KV cache of the MTP layers that draft. Of a hybrid's layers they are like the largest."""
    meta, count = candidate.file.meta, candidate.mtp_layers
    if not count:
        return 0
    weights = sum(each.bytes for each in meta.tensors if (layer_of(each) or 0) >= meta.n_layer - count)
    return weights + count * max(cache_by_layer(candidate.memory, drafting(settings)))


def places(candidate: Candidate, inputs: PlanInputs, whole: PlanInputs) -> Iterator[str | None]:
    """Yield the memory domains where the drafter may be, best first: a GPU of the model, another one, the host.

    `inputs` are those of one set of devices, `whole` those of all. None: the engine puts it where the model is.
    """
    devices = {"--spec-draft-device", "--device-draft", "-devd"} & whole.engine.flags.keys()
    if candidate.drafter is None or candidate.file.draft_type != SIMPLE_DRAFT or not inputs.gpus:
        # One that is made for its model computes with tensors or the cache of it (src/models/eagle3.cpp).
        yield None
    elif not devices:  # before November 2024 the only choice was how many layers leave the CPU
        yield from (*(inputs.gpus if len(inputs.gpus) == len(inputs.local_gpus) == 1 else ()), whole.host)
    else:
        free = [gpu for gpu in whole.local_gpus if gpu not in inputs.gpus] if whole.discrete else []
        # One process uses one MIG instance: see gpu_sets.
        others = [] if any(gpu.startswith("MIG-") for gpu in whole.gpus) else free
        for gpus in (inputs.local_gpus, others):
            yield from sorted(gpus, key=whole.room_bytes, reverse=True)
        if whole.host not in inputs.gpus:
            yield whole.host


def draft_device(candidate: Candidate, inputs: PlanInputs) -> str | None:
    """Return llama.cpp's name of the drafter's device, `none` for the CPU; None where it follows the model."""
    if candidate.drafter is None or inputs.draft_on is None:
        return None
    if inputs.draft_on == inputs.host and inputs.host not in inputs.gpus:
        return "none"
    return f"CUDA{[*inputs.local_gpus, inputs.draft_on].index(inputs.draft_on)}"
