"""One memory assessment: what a model with these settings takes, domain by domain. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.model.file import ModelFile
from edge.plan.calibration import Correction
from edge.plan.compute import compute_bytes, host_compute_bytes
from edge.plan.kv import cache
from edge.plan.plan import MemoryBudget, Settings
from edge.plan.situation import Situation
from edge.plan.weights import Weights
from edge.units import MIB

# Measured: llama-server with no model on x86 keeps 20-30 MiB; vocabulary and templates come on top.
_PROCESS_BYTES = 48 * MIB
_VOCAB_BYTES_PER_TOKEN = 400
# An estimate until a start was measured: context, kernels and cuBLAS handles of one CUDA process.
_CUDA_CONTEXT_BYTES = 320 * MIB
# Reading without mmap streams the file through the page cache: that window must stay, the rest is evictable.
_STREAM_WINDOW_BYTES = 256 * MIB
# dio: four pinned staging buffers of 64 MiB.
_DIO_STAGING_BYTES = 256 * MIB


def budget(file: ModelFile, weights: Weights, settings: Settings, place: Situation) -> MemoryBudget:
    """Bytes by domain. Every domain that the model touches is in it."""
    meta = file.meta
    correction = place.corrections.get(meta.arch, Correction())
    on_gpu = settings.n_gpu_layers > 0 and bool(place.gpus)
    layers = cache(meta, settings).by_layer
    domains: MemoryBudget = {place.host: place.domain(place.host)}
    if on_gpu:
        first = max(0, meta.n_layer + 1 - settings.n_gpu_layers)
        for name, share in _shares(settings, place, meta.n_layer, first):
            _add(domains, place, name, weights_bytes=_weights_on(weights, share))
            _add(domains, place, name, kv_bytes=sum(layers[i] for i in share if i < meta.n_layer))
            _add(domains, place, name, compute_bytes=int(compute_bytes(meta, settings) * correction.compute))
            _add(domains, place, name, context_bytes=_or(correction.context_bytes, _CUDA_CONTEXT_BYTES))
        _add(domains, place, place.host, weights_bytes=weights.on_host(settings.n_gpu_layers))
        _add(domains, place, place.host, kv_bytes=sum(layers[:first]))
        host_compute = host_compute_bytes(meta, settings) if first == 0 else compute_bytes(meta, settings)
        _add(domains, place, place.host, compute_bytes=int(host_compute * correction.compute))
    else:
        _add(domains, place, place.host, weights_bytes=weights.file_bytes, kv_bytes=sum(layers))
        _add(domains, place, place.host, compute_bytes=int(compute_bytes(meta, settings) * correction.compute))
    _add(
        domains,
        place,
        place.host,
        context_bytes=_PROCESS_BYTES + (meta.n_vocab or 0) * _VOCAB_BYTES_PER_TOKEN,
        prompt_cache_bytes=settings.cache_ram_bytes,
        page_cache_bytes=_page_cache(settings, weights),
    )
    return domains


def _add(domains: MemoryBudget, place: Situation, name: str, **parts: int) -> None:
    old = domains.get(name) or place.domain(name)
    domains[name] = replace(old, **{part: getattr(old, part) + size for part, size in parts.items()})


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _page_cache(settings: Settings, weights: Weights) -> int:
    if settings.load_mode == "mmap":
        return 0  # the mapped pages are the weights, counted there
    return _DIO_STAGING_BYTES if settings.load_mode == "dio" else min(_STREAM_WINDOW_BYTES, weights.file_bytes)


def _weights_on(weights: Weights, share: range) -> int:
    """Layers by number; the number after the last is the output."""
    count = len(weights.by_layer)
    output = weights.output_bytes + weights.tied_bytes if count in share else 0
    return output + sum(weights.by_layer[share.start : min(share.stop, count)])


def _shares(settings: Settings, place: Situation, n_layer: int, first: int) -> list[tuple[str, range]]:
    """Which layers each GPU gets: contiguous runs in proportion to tensor_split, as llama.cpp cuts them."""
    gpus = place.gpus[: max(1, len(settings.tensor_split))] if settings.split_mode != "none" else place.gpus[:1]
    split = settings.tensor_split or (1.0,)
    total, count = sum(split) or 1.0, n_layer + 1 - first
    shares, start, reached = [], first, 0.0
    for index, name in enumerate(gpus):
        reached += split[index] / total
        stop = n_layer + 1 if index == len(gpus) - 1 else first + _ceiling(reached * count)
        shares.append((name, range(start, max(start, stop))))
        start = max(start, stop)
    return shares


def _ceiling(value: float) -> int:
    return -int(-value // 1)


def total_required(domains: MemoryBudget) -> int:
    return sum(domain.required_bytes for domain in domains.values())


def device_required(domains: MemoryBudget, place: Situation) -> int:
    """Bytes in the domains that decide: the GPUs' where they are discrete, else all."""
    if not place.discrete:
        return total_required(domains)
    return sum(domain.required_bytes for name, domain in domains.items() if name in place.gpus)


def shortfall(domains: MemoryBudget) -> dict[str, int]:
    """Missing bytes by domain; empty when it fits."""
    return {name: -domain.headroom_bytes for name, domain in domains.items() if not domain.fits}
