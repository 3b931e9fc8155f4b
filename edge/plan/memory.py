"""One memory assessment: what a model with these settings takes, domain by domain. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.plan.calibration import Correction
from edge.plan.compute import compute_bytes, device_compute_bytes, host_compute_bytes
from edge.plan.kv import cache_by_layer, checkpoint_bytes
from edge.plan.plan import MemoryBudget, Settings
from edge.plan.situation import Situation
from edge.plan.subject import Subject
from edge.units import MIB

# Measured: llama-server with a tiny model keeps 30-40 MiB of its own on x86; the vocabulary comes on top.
_PROCESS_BYTES = 40 * MIB
_VOCAB_BYTES_PER_TOKEN = 400
# An estimate until a start was measured: context, kernels and cuBLAS handles of one CUDA process.
_CUDA_CONTEXT_BYTES = 320 * MIB
# Reading without mmap streams the file through the page cache: that window must stay, the rest is evictable.
_STREAM_WINDOW_BYTES = 256 * MIB
# dio: four pinned staging buffers of 64 MiB.
_DIO_STAGING_BYTES = 256 * MIB


def budget(subject: Subject, settings: Settings, place: Situation) -> MemoryBudget:
    """Bytes by domain. Every domain that the model touches is in it."""
    domains: MemoryBudget = {place.host: place.domain(place.host)}
    if settings.n_gpu_layers > 0 and place.gpus:
        _offloaded(domains, subject, settings, place)
    else:
        meta, correction = subject.file.meta, _correction(subject, place)
        compute = compute_bytes(meta, subject.memory, settings, all_logits=place.all_logits)
        _add(
            domains,
            place,
            place.host,
            weights_bytes=subject.weights.file_bytes + subject.file.mmproj_bytes,
            kv_bytes=sum(cache_by_layer(subject.memory, settings)),
            compute_bytes=int(compute * correction.compute),
        )
    checkpoints = settings.ctx_checkpoints * settings.n_parallel * checkpoint_bytes(subject.memory, settings)
    _add(
        domains,
        place,
        place.host,
        context_bytes=_PROCESS_BYTES + (subject.file.meta.n_vocab or 0) * _VOCAB_BYTES_PER_TOKEN,
        prompt_cache_bytes=settings.cache_ram_bytes + checkpoints,
        page_cache_bytes=_page_cache(settings, subject),
    )
    return domains


def device_required(domains: MemoryBudget, place: Situation) -> int:
    """Bytes in the domains that decide: the GPUs' where they are discrete, else all."""
    if not place.discrete:
        return sum(domain.required_bytes for domain in domains.values())
    return sum(domain.required_bytes for name, domain in domains.items() if name in place.gpus)


def shares(settings: Settings, place: Situation, n_layer: int) -> list[tuple[str, range]]:
    """Which layers each GPU gets, the output being layer `n_layer`: runs in proportion to tensor_split, as llama.cpp
    cuts them."""
    first = max(0, n_layer + 1 - settings.n_gpu_layers)
    split = settings.tensor_split or (1.0,)
    gpus = place.gpus[: len(split)]
    total, count = sum(split) or 1.0, n_layer + 1 - first
    found, start, reached = [], first, 0.0
    for index, name in enumerate(gpus):
        reached += split[index] / total
        # The tiny amount keeps 0.3 * 10 from being cut above 3.
        stop = n_layer + 1 if index == len(gpus) - 1 else first - int(-(reached * count - 1e-6) // 1)
        found.append((name, range(start, max(start, stop))))
        start = max(start, stop)
    return found


def _offloaded(domains: MemoryBudget, subject: Subject, settings: Settings, place: Situation) -> None:
    meta, weights, correction = subject.file.meta, subject.weights, _correction(subject, place)
    caches = cache_by_layer(subject.memory, settings)
    compute = device_compute_bytes(meta, subject.memory, settings, all_logits=place.all_logits)
    context = _CUDA_CONTEXT_BYTES if correction.context_bytes is None else correction.context_bytes
    for index, (name, share) in enumerate(shares(settings, place, meta.n_layer)):
        _add(
            domains,
            place,
            name,
            weights_bytes=weights.of(share) + (0 if index else subject.file.mmproj_bytes),
            kv_bytes=sum(caches[share.start : share.stop]),
            compute_bytes=int(compute * correction.compute),
            context_bytes=context,
        )
    first = max(0, meta.n_layer + 1 - settings.n_gpu_layers)
    host_compute = host_compute_bytes(meta, subject.memory, settings)
    if first:
        host_compute = max(host_compute, compute)
    _add(
        domains,
        place,
        place.host,
        weights_bytes=weights.input_bytes + sum(weights.by_layer[:first]),
        kv_bytes=sum(caches[:first]),
        compute_bytes=int(host_compute * correction.compute),
    )


def _add(domains: MemoryBudget, place: Situation, name: str, **parts: int) -> None:
    old = domains.get(name) or place.domain(name)
    domains[name] = replace(old, **{part: getattr(old, part) + size for part, size in parts.items()})


def _correction(subject: Subject, place: Situation) -> Correction:
    return place.corrections.get(subject.file.meta.arch, Correction())


def _page_cache(settings: Settings, subject: Subject) -> int:
    if settings.load_mode == "mmap":
        return 0  # the mapped pages are the weights, counted there
    return _DIO_STAGING_BYTES if settings.load_mode == "dio" else min(_STREAM_WINDOW_BYTES, subject.weights.file_bytes)
