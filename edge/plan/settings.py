"""Wishes and one step of the ladder → the settings of an engine. Pure."""

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


def settings(wishes: Wishes, step: Step, subject: Subject, role: str, place: Situation) -> Settings:
    """Everything that the engine is told; offload is full where there is a GPU and the wish says so."""
    file = subject.file
    rows = _pooled_rows(wishes, step, subject)
    offloaded = wishes.offload == "full" and bool(place.gpus)
    several = offloaded and place.discrete and wishes.split_mode != "none" and len(place.gpus) > 1
    chosen = Settings(
        n_ctx=step.n_ctx,
        n_parallel=step.n_parallel,
        n_gpu_layers=file.meta.n_layer + 1 if offloaded else 0,
        kv_type_k=step.kv_type_k,
        kv_type_v=step.kv_type_v,
        # A quantized V cache needs flash attention.
        flash_attention=wishes.flash_attention if step.kv_type_v in _PLAIN_KV else "on",
        load_mode="mmap",
        n_threads=wishes.n_threads or max(1, place.board.cpu.physical_cores),
        cache_ram_bytes=wishes.cache_ram if role == "chat" and step.prompt_cache else 0,
        n_batch=min(wishes.n_batch, step.n_ctx) if role == "chat" else rows,
        n_ubatch=min(wishes.n_ubatch, wishes.n_batch, step.n_ctx) if role == "chat" else rows,
        devices=tuple(f"CUDA{i}" for i in range(len(place.gpus) if several else 1)) if offloaded else (),
        split_mode=(wishes.split_mode if several else "none") if offloaded and place.discrete else None,
        tensor_split=_tensor_split(wishes, place) if several else (),
        role=role,
        mmproj=file.mmproj,
    )
    chosen = replace(chosen, load_mode=load_mode(wishes, chosen, file.meta.n_layer))
    return _with_checkpoints(chosen, subject) if role == "chat" and subject.memory.needs_checkpoints else chosen


def _pooled_rows(wishes: Wishes, step: Step, subject: Subject) -> int:
    """An embedding's whole input goes into one batch, which a longer input would be refused for."""
    slot = step.n_ctx // step.n_parallel
    return slot if in_one_batch(subject.file.meta) else min(wishes.n_ubatch, slot)


def load_mode(wishes: Wishes, chosen: Settings, n_layer: int) -> str:
    """`none` only when all weights leave the host, direct I/O likewise: a host part could not be dropped (FC-19)."""
    full = chosen.n_gpu_layers > n_layer
    if wishes.load_mode in ("mmap", "none"):
        return wishes.load_mode
    if wishes.load_mode == "dio":
        return "dio" if full else "mmap"
    return "none" if full else "mmap"


def _with_checkpoints(chosen: Settings, subject: Subject) -> Settings:
    """Half of the prompt cache's cap goes to them, at least one: without any, a hybrid model reads each prompt anew."""
    size = max(1, checkpoint_bytes(subject.memory, chosen) * chosen.n_parallel)
    count = min(_MOST_CHECKPOINTS, max(1, chosen.cache_ram_bytes // 2 // size))
    left = max(0, chosen.cache_ram_bytes - count * size)
    return replace(chosen, ctx_checkpoints=count, cache_ram_bytes=left // MIB * MIB)


def _tensor_split(wishes: Wishes, place: Situation) -> tuple[float, ...]:
    """Free memory of each card in GiB: llama.cpp takes proportions."""
    if len(wishes.tensor_split) == len(place.gpus):
        return wishes.tensor_split
    free = (place.available_bytes[gpu] - place.reserve_bytes[gpu] for gpu in place.gpus)
    return tuple(max(0.1, round(size / GIB, 1)) for size in free)
