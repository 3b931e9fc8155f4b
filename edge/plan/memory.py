"""Estimate what a model with these settings takes, by memory domain. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from msgspec.structs import replace

from edge.board.board import Board
from edge.engine.engine import Engine
from edge.plan.calibration import Calibration, calibration_key, settled
from edge.plan.companions import drafter_bytes, drafting, mtp_bytes
from edge.plan.compute import compute_bytes, device_compute_bytes, host_compute_bytes
from edge.plan.inputs import Candidate, PlanInputs, Weights, is_remote
from edge.plan.kv_cache import cache_by_layer, checkpoint_bytes
from edge.plan.plan import MemoryBudget, Settings
from edge.units import GIB, MIB

# Measured on x86: llama-server with a tiny model keeps 30-40 MiB of its own, and about 400 bytes a token of vocabulary.
_PROCESS_BYTES = 40 * MIB
_VOCAB_BYTES_PER_TOKEN = 400
# Context, kernels and cuBLAS handles of one CUDA process; an estimate until a start was measured. An H200 took 566 MiB
# with every model: the context grows with the number of multiprocessors, which the memory of a GPU stands for here.
_CUDA_CONTEXT_BYTES = 320 * MIB
_LARGE_CUDA_CONTEXT_BYTES = 600 * MIB
_LARGE_GPU_BYTES = 40 * GIB
# Reading without mmap streams the file through the page cache: an allowance for that window, the rest is evictable.
_STREAM_WINDOW_BYTES = 256 * MIB
# Direct I/O reads through four pinned staging buffers of 64 MiB (llama-model-loader.cpp, load_all_data).
_DIO_STAGING_BYTES = 256 * MIB


def budget(candidate: Candidate, settings: Settings, inputs: PlanInputs) -> MemoryBudget:
    """Return the bytes by domain, for every domain that the model touches."""
    domains: MemoryBudget = {inputs.host: inputs.domain(inputs.host)}
    if settings.n_gpu_layers > 0 and inputs.gpus:
        _offloaded(domains, candidate, settings, inputs)
    else:
        calibration = _calibration(candidate, settings, inputs)
        build = {"all_logits": inputs.all_logits, "mixed": inputs.mixed_batches}
        compute = compute_bytes(candidate.file.meta, candidate.memory, settings, **build)
        _add(
            domains,
            inputs,
            inputs.host,
            weights_bytes=host_weights_bytes(candidate.weights, settings, inputs)
            + candidate.file.beside_bytes
            + draft_bytes(candidate, settings, inputs)
            + mtp_bytes(candidate, settings),
            kv_bytes=sum(_caches(candidate, settings, calibration)),
            compute_bytes=int(compute * calibration.compute) + _image_bytes(settings),
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


def draft_bytes(candidate: Candidate, settings: Settings, inputs: PlanInputs) -> int:
    """Return the bytes of the drafter, with the compute buffers of its context."""
    if candidate.drafter is None:
        return 0
    return drafter_bytes(candidate, settings) + _device_compute(candidate.drafter, drafting(settings), inputs)


def _device_compute(candidate: Candidate, settings: Settings, inputs: PlanInputs) -> int:
    return device_compute_bytes(candidate.file.meta, candidate.memory, settings, all_logits=inputs.all_logits)


def _copied_bytes(candidate: Candidate, settings: Settings) -> int:
    """Return the bytes of a GPU's copy of host weights: it computes those too for a large batch (--op-offload)."""
    weights, partial = candidate.weights, settings.n_gpu_layers <= candidate.file.meta.n_layer
    return weights.largest_bytes if partial or settings.cpu_expert_layers or weights.hosted_bytes else 0


def device_required(domains: MemoryBudget, inputs: PlanInputs) -> int:
    """Return the bytes that the ladder has to reduce: the GPUs' where they are discrete, else all."""
    placed = {*inputs.gpus, *inputs.remote_domains}
    if not inputs.discrete:
        return sum(domain.required_bytes for domain in domains.values())
    return sum(domain.required_bytes for name, domain in domains.items() if name in placed)


def shares(settings: Settings, inputs: PlanInputs, n_layer: int) -> list[tuple[str, range]]:
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
        # 1e-6 keeps a product such as 0.3 * 10 from being rounded above 3.
        stop = n_layer + 1 if index == len(gpus) - 1 else first - int(-(reached * count - 1e-6) // 1)
        found.append((name, range(start, max(start, stop))))
        start = max(start, stop)
    return found


def layer_split(candidate: Candidate, settings: Settings, inputs: PlanInputs) -> tuple[float, ...]:
    """Return how many offloaded layers each GPU gets, so that the fullest one is as empty as possible.

    llama.cpp takes the numbers as proportions, and cuts at whole layers. Where the layers do not fit, by free memory.
    """
    meta, weights = candidate.file.meta, candidate.weights
    calibration = _calibration(candidate, settings, inputs)
    caches = _caches(candidate, settings, calibration)
    first = max(0, meta.n_layer + 1 - settings.n_gpu_layers)
    sizes = [
        weights.of(range(i, i + 1), settings.cpu_expert_layers) + sum(caches[i : i + 1])
        for i in range(first, meta.n_layer + 1)
    ]
    fixed = int(_device_compute(candidate, settings, inputs) * calibration.compute)
    copied = _copied_bytes(candidate, settings)
    local = [0 if is_remote(gpu) else _context_bytes(inputs, gpu) + copied for gpu in inputs.gpus]
    rooms = [inputs.room_bytes(gpu) - fixed - own for gpu, own in zip(inputs.gpus, local, strict=True)]
    rooms[0] -= candidate.file.beside_bytes + _image_bytes(settings)
    rooms[-1] -= mtp_bytes(candidate, settings)  # the last layers
    if (drafts_on := inputs.draft_on or inputs.gpus[0]) in inputs.gpus:
        rooms[inputs.gpus.index(drafts_on)] -= draft_bytes(candidate, settings, inputs)
    if inputs.host in inputs.gpus:  # unified memory beside rpc-servers: it also holds what stays on the host
        rooms[inputs.gpus.index(inputs.host)] -= _on_host_bytes(candidate, settings, inputs)
    best, low, high = _packed(sizes, rooms, 1.0), 0.0, 1.0
    if best is None:
        return tuple(max(0.1, round(inputs.room_bytes(gpu) / GIB, 1)) for gpu in inputs.gpus)
    for _ in range(8):  # to a quarter of a percent of the fullest GPU
        middle = (low + high) / 2
        found = _packed(sizes, rooms, middle)
        best, low, high = (best, middle, high) if found is None else (found, low, middle)
    return tuple(float(count) for count in best)


def _on_host_bytes(candidate: Candidate, settings: Settings, inputs: PlanInputs) -> int:
    """Return the bytes of a fully offloaded model that are in host memory."""
    alone = replace(inputs, gpus=(inputs.host,))
    whole = budget(candidate, replace(settings, devices=(), tensor_split=()), alone)[inputs.host]
    layers = candidate.weights.of(range(candidate.file.meta.n_layer + 1), 0)
    compute = int(_device_compute(candidate, settings, inputs) * _calibration(candidate, settings, inputs).compute)
    kv = sum(cache_by_layer(candidate.memory, settings))
    return max(0, whole.required_bytes - layers - kv - compute - _context_bytes(inputs, inputs.host))


def _packed(sizes: Sequence[int], rooms: Sequence[int], part: float) -> list[int] | None:
    """Fill the GPUs in their order up to `part` of their room; None where not every layer finds one."""
    counts, index, used = [0] * len(rooms), 0, 0
    for size in sizes:
        while index < len(rooms) and used + size > rooms[index] * part:
            index, used = index + 1, 0
        if index == len(rooms):
            return None
        counts[index] += 1
        used += size
    return counts


def _context_bytes(inputs: PlanInputs, domain: str) -> int:
    """Return the bytes of this engine's CUDA context on one GPU: as measured with any model, else by its memory."""
    samples = [size for calibration in inputs.calibrations.values() for size in calibration.context_bytes]
    memory_bytes = max((gpu.memory_bytes or 0 for gpu in inputs.board.gpus if gpu.uuid == domain), default=0)
    estimate = _LARGE_CUDA_CONTEXT_BYTES if memory_bytes > _LARGE_GPU_BYTES else _CUDA_CONTEXT_BYTES
    return int(settled(samples, estimate))


def _offloaded(domains: MemoryBudget, candidate: Candidate, settings: Settings, inputs: PlanInputs) -> None:
    meta, weights, calibration = candidate.file.meta, candidate.weights, _calibration(candidate, settings, inputs)
    caches = _caches(candidate, settings, calibration)
    compute = _device_compute(candidate, settings, inputs)
    first, on_host = max(0, meta.n_layer + 1 - settings.n_gpu_layers), settings.cpu_expert_layers
    copied = _copied_bytes(candidate, settings)
    for index, (name, share) in enumerate(shares(settings, inputs, meta.n_layer)):
        remote = is_remote(name)  # its process has its context, and never computes host weights
        _add(
            domains,
            inputs,
            name,
            weights_bytes=weights.of(share, on_host) + (0 if index else candidate.file.beside_bytes),
            kv_bytes=sum(caches[share.start : share.stop]),
            compute_bytes=int(compute * calibration.compute)
            + (0 if remote else copied)
            + (0 if index else _image_bytes(settings)),
            context_bytes=0 if remote else _context_bytes(inputs, name),
        )
    experts = sum(weights.experts[meta.n_layer - on_host :]) if on_host else 0
    host_compute = host_compute_bytes(meta, candidate.memory, settings, mixed=inputs.mixed_batches)
    if first or on_host or weights.hosted_bytes:
        host_compute = max(host_compute, compute)
    _drafting(domains, candidate, settings, inputs)
    _add(
        domains,
        inputs,
        inputs.host,
        weights_bytes=weights.input_bytes + sum(weights.by_layer[:first]) + experts,
        kv_bytes=sum(caches[:first]),
        compute_bytes=int(host_compute * calibration.compute),
    )


def _drafting(domains: MemoryBudget, candidate: Candidate, settings: Settings, inputs: PlanInputs) -> None:
    """Add what drafts: MTP layers are the last of the model, a drafter may be on a GPU of its own."""
    gpus = [name for name, _ in shares(settings, inputs, candidate.file.meta.n_layer)]
    if size := mtp_bytes(candidate, settings):
        _add(domains, inputs, gpus[-1], weights_bytes=size)
    if size := draft_bytes(candidate, settings, inputs):
        name = inputs.draft_on or gpus[0]
        alone = name not in gpus and name != inputs.host
        _add(domains, inputs, name, weights_bytes=size, context_bytes=_context_bytes(inputs, name) if alone else 0)


def _image_bytes(settings: Settings) -> int:
    """Return the bytes that the first image allocates: with --no-warmup they come after READY."""
    return settings.images.compute_bytes if settings.images else 0


def _add(domains: MemoryBudget, inputs: PlanInputs, name: str, **parts: int) -> None:
    old = domains.get(name) or inputs.domain(name)
    domains[name] = replace(old, **{part: getattr(old, part) + size for part, size in parts.items()})


def _calibration(candidate: Candidate, settings: Settings, inputs: PlanInputs) -> Calibration:
    return inputs.calibrations.get(calibration_key(candidate.file.meta.arch, settings), Calibration())


def _caches(candidate: Candidate, settings: Settings, calibration: Calibration) -> tuple[int, ...]:
    factor = calibration.kv(candidate.file.meta)
    sizes = cache_by_layer(candidate.memory, settings)
    return sizes if factor == 1.0 else tuple(int(size * factor) for size in sizes)


def _page_cache(settings: Settings, candidate: Candidate) -> int:
    if settings.load_mode == "mmap":
        return 0  # the mapped pages are the weights, counted there
    return (
        _DIO_STAGING_BYTES if settings.load_mode == "dio" else min(_STREAM_WINDOW_BYTES, candidate.weights.file_bytes)
    )


# Weights that a CPU engine keeps in a layout of its own, beside those of the file.

# AMX adds four bytes a block to these (ggml-cpu/amx/mmq.cpp, get_row_size): old and new size.
_AMX_BLOCKS = {"Q8_0": (34, 38), "Q4_K": (144, 148), "Q5_K": (176, 180)}


def repacked_types(board: Board, engine: Engine) -> frozenset[str]:
    """Return the tensor types that the engine keeps in a layout of this CPU (ggml-cpu/repack.cpp), with its kernels."""
    isa = set(board.cpu.isa)
    if "asimd" in isa:  # the embedded engine is built for the base of Armv8, without these instructions
        fast = {"asimddp", "i8mm"} & isa and engine.kind != "embedded"
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"}) if fast else frozenset()
    if _amx(board, engine):
        return frozenset({"F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL", "MXFP4"})
    return _x86_types(isa, engine)


def _x86_types(isa: set[str], engine: Engine) -> frozenset[str]:
    found = {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"} if "avx2" in isa else set()
    return frozenset(found | ({"Q2_K"} if "avx512f" in isa and engine.kind != "embedded" else set()))


def _amx(board: Board, engine: Engine) -> bool:
    """Return whether ggml-cpu/amx has the matrices: a native build, seen on the host of an H200."""
    return "amx_int8" in board.cpu.isa and engine.kind != "embedded"


def repacked_bytes(weights: Weights, inputs: PlanInputs) -> int:
    """Return the bytes of the matrices that this engine repacks for this CPU; AMX takes no stacks of experts."""
    types, stacked = repacked_types(inputs.board, inputs.engine), weights.stacked
    if not _amx(inputs.board, inputs.engine):
        return sum(size for kind, size in weights.matrices.items() if kind in types)
    stacked_types = _x86_types(set(inputs.board.cpu.isa), inputs.engine)
    flat = {kind: size - stacked.get(kind, 0) for kind, size in weights.matrices.items() if kind in types}
    grown = sum(size + _amx_bytes(kind, size) for kind, size in flat.items())
    return grown + sum(size for kind, size in stacked.items() if kind in stacked_types)


def _amx_bytes(kind: str, size: int) -> int:
    """Return what a matrix of this type grows by in the layout of AMX."""
    old, new = _AMX_BLOCKS.get(kind, (1, 1))
    return size * (new - old) // old


def host_weights_bytes(weights: Weights, settings: Settings, inputs: PlanInputs) -> int:
    """Return the bytes of all weights on the CPU: repacked matrices beside the mapping that they were read from.

    Without a mapping only a table that is the output too is there twice, once repacked.
    """
    types = repacked_types(inputs.board, inputs.engine)
    if settings.load_mode != "mmap":
        flat = {kind: size - weights.stacked.get(kind, 0) for kind, size in weights.matrices.items()}
        grown = sum(_amx_bytes(*each) for each in flat.items()) if _amx(inputs.board, inputs.engine) else 0
        return weights.file_bytes + grown + (weights.tied_bytes if weights.tied_type in types else 0)
    unmapped = sum(size for kind, size in takewhile(lambda each: each[0] in types, weights.tail))
    return weights.file_bytes - unmapped + repacked_bytes(weights, inputs)
