"""Wishes and one step of the ladder → the settings of an engine, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge.config.values import ModelConfig
from edge.model.file import ModelFile
from edge.plan.ladder import Step
from edge.plan.plan import Reason, Settings
from edge.plan.situation import Situation
from edge.profile.profile import Wishes

_GIB = 1024**3


def settings(wishes: Wishes, step: Step, file: ModelFile, config: ModelConfig, place: Situation) -> Settings:
    """Everything that the engine is told; offload is full where there is a GPU and the wish says so."""
    offloaded = wishes.offload == "full" and bool(place.gpus)
    several = offloaded and place.discrete and wishes.split_mode != "none" and len(place.gpus) > 1
    chosen = Settings(
        n_ctx=step.n_ctx,
        n_parallel=step.n_parallel,
        n_gpu_layers=file.meta.n_layer + 1 if offloaded else 0,
        kv_type_k=step.kv_type_k,
        kv_type_v=step.kv_type_v,
        flash_attention=_flash_attention(wishes, step),
        load_mode="mmap",
        n_threads=wishes.n_threads or max(1, place.board.cpu.physical_cores),
        cache_ram_bytes=wishes.cache_ram if config.role == "chat" else 0,
        n_batch=min(wishes.n_batch, step.n_ctx) if config.role == "chat" else wishes.n_batch,
        n_ubatch=min(wishes.n_ubatch, wishes.n_batch),
        devices=tuple(f"CUDA{i}" for i in range(len(place.gpus) if several else 1)) if offloaded else (),
        split_mode=(wishes.split_mode if several else "none") if offloaded and place.discrete else None,
        tensor_split=_tensor_split(wishes, place) if several else (),
        role=config.role,
        mmproj=file.mmproj,
    )
    return replace(chosen, load_mode=load_mode(wishes, chosen, file, place))


def load_mode(wishes: Wishes, chosen: Settings, file: ModelFile, place: Situation) -> str:
    """`none` only when all weights leave the host, direct I/O likewise: a host part could not be dropped (FC-19)."""
    full = chosen.n_gpu_layers > file.meta.n_layer
    if wishes.load_mode in ("mmap", "none"):
        return wishes.load_mode
    if wishes.load_mode == "dio":
        return "dio" if full else "mmap"
    return "none" if full else "mmap"


def reasons(
    chosen: Settings, wishes: Wishes, file: ModelFile, place: Situation, origins: dict[str, str]
) -> Iterator[Reason]:
    """Why each setting has its value."""
    meta = file.meta

    def first(key: str) -> str:
        return origins.get(key, "default")

    slot = chosen.n_ctx // chosen.n_parallel
    yield Reason("model", f"{file.name} {file.quant}", f"{file.bytes / 1e9:.2f} GB", "model")
    limit = f"trained for {meta.n_ctx_train}" if slot >= meta.n_ctx_train > 0 else f"of {meta.n_ctx_train} trained"
    yield Reason("n_ctx", str(chosen.n_ctx), f"{slot} tokens a slot, {limit}", first("n_ctx"))
    yield Reason("n_parallel", str(chosen.n_parallel), "requests at once", first("n_parallel"))
    yield Reason("n_gpu_layers", f"{chosen.n_gpu_layers}/{meta.n_layer + 1}", _offload(chosen, meta.n_layer, place))
    kv = chosen.kv_type_k if chosen.kv_type_k == chosen.kv_type_v else f"{chosen.kv_type_k}/{chosen.kv_type_v}"
    wished = (chosen.kv_type_k, chosen.kv_type_v) == (wishes.kv_type_k, wishes.kv_type_v)
    yield Reason("kv_type", kv, "as wished" if wished else "smaller, so that it fits", first("kv_type_k"))
    flash = "a quantized V cache needs it" if chosen.kv_type_v not in ("f16", "f32", "bf16") else "as wished"
    yield Reason("flash_attention", chosen.flash_attention, flash, first("flash_attention"))
    yield Reason("load_mode", chosen.load_mode, _load(chosen, meta.n_layer), first("load_mode"))
    threads = "as wished" if wishes.n_threads else f"{place.board.cpu.physical_cores} physical cores"
    yield Reason("n_threads", str(chosen.n_threads), threads, first("n_threads"))
    cap = "the engine's own default is 8 GiB of host memory"
    yield Reason("cache_ram", f"{chosen.cache_ram_bytes // 1024**2} MiB", cap, first("cache_ram"))


def _flash_attention(wishes: Wishes, step: Step) -> str:
    return "on" if step.kv_type_v not in ("f16", "f32", "bf16") else wishes.flash_attention


def _tensor_split(wishes: Wishes, place: Situation) -> tuple[float, ...]:
    if len(wishes.tensor_split) == len(place.gpus):
        return wishes.tensor_split
    return tuple(
        max(0.1, round((place.available_bytes[gpu] - place.reserve_bytes[gpu]) / _GIB, 1)) for gpu in place.gpus
    )


def _offload(chosen: Settings, n_layer: int, place: Situation) -> str:
    if chosen.n_gpu_layers > n_layer:
        return f"everything on {', '.join(chosen.devices)}"
    if chosen.n_gpu_layers:
        return "what fits on the GPU; the rest runs on the CPU, slower"
    return "no GPU is used" if place.gpus else "no GPU that this engine can use"


def _load(chosen: Settings, n_layer: int) -> str:
    if chosen.load_mode == "mmap":
        return "weights on the host are mapped: the next start finds them in the page cache"
    if chosen.n_gpu_layers > n_layer:
        return "all weights go to the GPU: a mapping would keep them twice"
    return "as wished"
