"""Estimate what a model with these settings takes, by memory domain. Pure."""

from __future__ import annotations

from dataclasses import replace

from edge.plan.calibration import Correction
from edge.plan.compute import compute_bytes, device_compute_bytes, host_compute_bytes
from edge.plan.kv import cache_by_layer, checkpoint_bytes
from edge.plan.plan import MemoryBudget, Settings
from edge.plan.situation import Situation
from edge.plan.subject import Subject
from edge.units import MIB

# Measured on x86: llama-server with a tiny model keeps 30-40 MiB of its own, and about 400 bytes a token of vocabulary.
_PROCESS_BYTES = 40 * MIB
_VOCAB_BYTES_PER_TOKEN = 400
# Context, kernels and cuBLAS handles of one CUDA process; an estimate until a start was measured.
_CUDA_CONTEXT_BYTES = 320 * MIB
# Reading without mmap streams the file through the page cache: an allowance for that window, the rest is evictable.
_STREAM_WINDOW_BYTES = 256 * MIB
# Direct I/O reads through four pinned staging buffers of 64 MiB (llama-model-loader.cpp, load_all_data).
_DIO_STAGING_BYTES = 256 * MIB


def budget(candidate: Subject, settings: Settings, inputs: Situation) -> MemoryBudget:
    """Return the bytes by domain, for every domain that the model touches."""
    domains: MemoryBudget = {inputs.host: inputs.domain(inputs.host)}
    if settings.n_gpu_layers > 0 and inputs.gpus:
        _offloaded(domains, candidate, settings, inputs)
    else:
        meta, calibration = candidate.file.meta, _calibration(candidate, inputs)
        compute = compute_bytes(meta, candidate.memory, settings, all_logits=inputs.all_logits)
        _add(
            domains,
            inputs,
            inputs.host,
            weights_bytes=candidate.weights.file_bytes + candidate.file.mmproj_bytes,
            kv_bytes=sum(cache_by_layer(candidate.memory, settings)),
            compute_bytes=int(compute * calibration.compute),
        )
    checkpoints = settings.ctx_checkpoints * settings.n_parallel * checkpoint_bytes(candidate.memory, settings)
    _add(
        domains,
        inputs,
        inputs.host,
        context_bytes=_PROCESS_BYTES + (candidate.file.meta.n_vocab or 0) * _VOCAB_BYTES_PER_TOKEN,
        prompt_cache_bytes=settings.cache_ram_bytes + checkpoints,
        page_cache_bytes=_page_cache(settings, candidate),
    )
    return domains


def device_required(domains: MemoryBudget, inputs: Situation) -> int:
    """Return the bytes that the ladder has to reduce: the GPUs' where they are discrete, else all."""
    if not inputs.discrete:
        return sum(domain.required_bytes for domain in domains.values())
    return sum(domain.required_bytes for name, domain in domains.items() if name in inputs.gpus)


def shares(settings: Settings, inputs: Situation, n_layer: int) -> list[tuple[str, range]]:
    """Return the layers of each GPU, the output being layer `n_layer`: runs in proportion to tensor_split.

    Source: llama-model.cpp, load_tensors.
    """
    first = max(0, n_layer + 1 - settings.n_gpu_layers)
    split = settings.tensor_split or (1.0,)
    gpus = inputs.gpus[: len(split)]
    total, count = sum(split) or 1.0, n_layer + 1 - first
    found, start, reached = [], first, 0.0
    for index, name in enumerate(gpus):
        reached += split[index] / total
        # The tiny amount keeps 0.3 * 10 from being cut above 3.
        stop = n_layer + 1 if index == len(gpus) - 1 else first - int(-(reached * count - 1e-6) // 1)
        found.append((name, range(start, max(start, stop))))
        start = max(start, stop)
    return found


def _offloaded(domains: MemoryBudget, candidate: Subject, settings: Settings, inputs: Situation) -> None:
    meta, weights, calibration = candidate.file.meta, candidate.weights, _calibration(candidate, inputs)
    caches = cache_by_layer(candidate.memory, settings)
    compute = device_compute_bytes(meta, candidate.memory, settings, all_logits=inputs.all_logits)
    context = _CUDA_CONTEXT_BYTES if calibration.context_bytes is None else calibration.context_bytes
    for index, (name, share) in enumerate(shares(settings, inputs, meta.n_layer)):
        _add(
            domains,
            inputs,
            name,
            weights_bytes=weights.of(share) + (0 if index else candidate.file.mmproj_bytes),
            kv_bytes=sum(caches[share.start : share.stop]),
            compute_bytes=int(compute * calibration.compute),
            context_bytes=context,
        )
    first = max(0, meta.n_layer + 1 - settings.n_gpu_layers)
    host_compute = host_compute_bytes(meta, candidate.memory, settings)
    if first:
        host_compute = max(host_compute, compute)
    _add(
        domains,
        inputs,
        inputs.host,
        weights_bytes=weights.input_bytes + sum(weights.by_layer[:first]),
        kv_bytes=sum(caches[:first]),
        compute_bytes=int(host_compute * calibration.compute),
    )


def _add(domains: MemoryBudget, inputs: Situation, name: str, **parts: int) -> None:
    old = domains.get(name) or inputs.domain(name)
    domains[name] = replace(old, **{part: getattr(old, part) + size for part, size in parts.items()})


def _calibration(candidate: Subject, inputs: Situation) -> Correction:
    return inputs.calibrations.get(candidate.file.meta.arch, Correction())


def _page_cache(settings: Settings, candidate: Subject) -> int:
    if settings.load_mode == "mmap":
        return 0  # the mapped pages are the weights, counted there
    return (
        _DIO_STAGING_BYTES if settings.load_mode == "dio" else min(_STREAM_WINDOW_BYTES, candidate.weights.file_bytes)
    )
