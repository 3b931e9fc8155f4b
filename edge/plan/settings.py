"""Build engine settings from a preset and one step of the ladder. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.plan.kv import checkpoint_bytes
from edge.plan.ladder import Step
from edge.plan.plan import Settings
from edge.plan.role import in_one_batch
from edge.plan.situation import Situation
from edge.plan.subject import Subject
from edge.profile.profile import Wishes
from edge.units import GIB, MIB

_PLAIN_KV = ("f32", "f16", "bf16")
_MOST_CHECKPOINTS = 32  # llama-server's own default


def settings(preset: Wishes, step: Step, candidate: Subject, role: str, inputs: Situation) -> Settings:
    """Build engine settings; offload all layers where there is a GPU and the preset asks for it."""
    file = candidate.file
    rows = _pooled_rows(preset, step, candidate)
    offloaded = preset.offload == "full" and bool(inputs.gpus)
    several = offloaded and inputs.discrete and preset.split_mode != "none" and len(inputs.gpus) > 1
    chosen = Settings(
        n_ctx=step.n_ctx,
        n_parallel=step.n_parallel,
        n_gpu_layers=file.meta.n_layer + 1 if offloaded else 0,
        kv_type_k=step.kv_type_k,
        kv_type_v=step.kv_type_v,
        # A quantized V cache needs flash attention.
        flash_attention=preset.flash_attention if step.kv_type_v in _PLAIN_KV else "on",
        load_mode="mmap",
        n_threads=preset.n_threads or max(1, inputs.board.cpu.physical_cores),
        cache_ram_bytes=preset.cache_ram if role == "chat" and step.prompt_cache else 0,
        n_batch=min(preset.n_batch, step.n_ctx) if role == "chat" else rows,
        n_ubatch=min(preset.n_ubatch, preset.n_batch, step.n_ctx) if role == "chat" else rows,
        devices=tuple(f"CUDA{i}" for i in range(len(inputs.gpus) if several else 1)) if offloaded else (),
        split_mode=(preset.split_mode if several else "none") if offloaded and inputs.discrete else None,
        tensor_split=_tensor_split(preset, inputs) if several else (),
        role=role,
        mmproj=file.mmproj,
    )
    chosen = replace(chosen, load_mode=load_mode(preset, chosen, file.meta.n_layer))
    return _with_checkpoints(chosen, candidate) if role == "chat" and candidate.memory.needs_checkpoints else chosen


def _pooled_rows(preset: Wishes, step: Step, candidate: Subject) -> int:
    """Return the batch of an embedding model: the engine refuses an input that is longer."""
    slot = step.n_ctx // step.n_parallel
    return slot if in_one_batch(candidate.file.meta) else min(preset.n_ubatch, slot)


def load_mode(preset: Wishes, chosen: Settings, n_layer: int) -> str:
    """Return `none` or `dio` only when all weights leave the host: a host part could not be dropped (FC-19)."""
    full = chosen.n_gpu_layers > n_layer
    if preset.load_mode in ("mmap", "none"):
        return preset.load_mode
    if preset.load_mode == "dio":
        return "dio" if full else "mmap"
    return "none" if full else "mmap"


def _with_checkpoints(chosen: Settings, candidate: Subject) -> Settings:
    """Give half of the prompt cache to checkpoints, at least one: without, a hybrid model reads each prompt anew."""
    size = max(1, checkpoint_bytes(candidate.memory, chosen) * chosen.n_parallel)
    count = min(_MOST_CHECKPOINTS, max(1, chosen.cache_ram_bytes // 2 // size))
    left = max(0, chosen.cache_ram_bytes - count * size)
    return replace(chosen, ctx_checkpoints=count, cache_ram_bytes=left // MIB * MIB)


def _tensor_split(preset: Wishes, inputs: Situation) -> tuple[float, ...]:
    """Return the free memory of each GPU in GiB: llama.cpp takes proportions."""
    if len(preset.tensor_split) == len(inputs.gpus):
        return preset.tensor_split
    free = (inputs.available_bytes[gpu] - inputs.reserve_bytes[gpu] for gpu in inputs.gpus)
    return tuple(max(0.1, round(size / GIB, 1)) for size in free)
