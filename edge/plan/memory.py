"""Estimate what a model with these settings takes, by memory domain. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from edge.models.meta import ModelMeta
from edge.plan.calibration import Calibration, calibration_key, settled
from edge.plan.drafters import drafter_bytes, drafting, mtp_bytes
from edge.plan.inputs import Candidate, PlanInputs, host_weights_bytes, is_remote
from edge.plan.kv_cache import (
    ENCODERS,
    PLAIN_KV,
    KvBytes,
    cache_by_layer,
    checkpoint_bytes,
    integer,
    slot_context,
    window_cells,
)
from edge.plan.plan import MemoryBudget, Settings
from edge.units import GIB, MIB

# Estimate the engine's compute buffers. The graph allocator decides; a measured start calibrates it. Pure.

_F32, _F16 = 4, 2
_WITHOUT_FEED_FORWARD = frozenset({"mamba", "mamba2"})
_DELTA_NETS = frozenset({"qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
_INPUTS = 12  # positions, indices and the like: values a row


def compute_bytes(meta: ModelMeta, memory: KvBytes, settings: Settings, *, all_logits: bool = False) -> int:
    """Return the bytes where one domain holds all layers. `all_logits`: reserved for every token of a batch."""
    if meta.arch in ENCODERS:
        return _encoder(meta, memory, settings)
    inputs = _rows(settings) * _F32 * 2 * meta.n_embd
    return _device(meta, memory, settings, all_logits) + inputs + _output(meta, settings)


def device_compute_bytes(meta: ModelMeta, memory: KvBytes, settings: Settings, *, all_logits: bool = False) -> int:
    """Return the bytes on a GPU that holds layers; the inputs stay on the host."""
    return _device(meta, memory, settings, all_logits)


def host_compute_bytes(meta: ModelMeta, memory: KvBytes, settings: Settings) -> int:
    """Return the bytes on the host beside an offloaded model: inputs, mask and output of one batch."""
    return _rows(settings) * _F32 * 2 * meta.n_embd + _mask(memory, settings, _F16) + _output(meta, settings)


def feed_forward(meta: ModelMeta) -> int:
    """Return the values a token of the widest feed-forward: all experts that one token uses."""
    experts = integer(meta, "expert_used_count")
    dense = integer(meta, "feed_forward_length") or 4 * meta.n_embd
    if not experts:
        return dense
    shared = integer(meta, "expert_shared_feed_forward_length")
    return max(experts * (integer(meta, "expert_feed_forward_length") or dense), shared)


def _feed_values(meta: ModelMeta) -> int:
    """Return the values a token at the feed-forward: gate, up and their product, three rows of embeddings.

    Experts that are narrow against the embedding also leave one row each before their sum.
    """
    if meta.arch in _WITHOUT_FEED_FORWARD:
        return 0
    return 3 * feed_forward(meta) + _expert_outputs(meta) + 3 * meta.n_embd + _per_layer_values(meta) + _INPUTS


def _expert_outputs(meta: ModelMeta) -> int:
    """Return the values a token of the rows that narrow experts leave before their sum; 0 for wide ones."""
    outputs = integer(meta, "expert_used_count") * meta.n_embd
    return outputs if outputs > 2 * feed_forward(meta) else 0


def _per_layer_values(meta: ModelMeta) -> int:
    """Return the values a token of Gemma's embeddings for all layers, which are there through the whole graph."""
    return 2 * meta.n_layer * integer(meta, "embedding_length_per_layer_input")


def _attention_values(meta: ModelMeta) -> int:
    """Return the values a token at flash attention: Q, K, V, its output, three rows of embeddings."""
    if latent := integer(meta, "attention.key_length_mla"):  # Q before and after it is absorbed into the latent space
        heads = meta.n_head * (meta.key_length + meta.value_length + latent)
        return heads + meta.key_length + 3 * meta.n_embd + _INPUTS
    keys = max(meta.n_head_kv, default=0) * (meta.key_length + meta.value_length)
    queries = meta.n_head * (meta.key_length + meta.value_length)
    return queries + keys + 3 * meta.n_embd + _per_layer_values(meta) + _INPUTS


def _recurrent_bytes(meta: ModelMeta, memory: KvBytes, settings: Settings) -> int:
    """Return the bytes at a recurrent layer: delta nets hold their convolution three times, state spaces twice."""
    inner, state = integer(meta, "ssm.inner_size"), integer(meta, "ssm.state_size")
    if not inner or not any(layer.recurrent for layer in memory.layers):
        return 0
    groups = integer(meta, "ssm.group_count")
    channels = inner + 2 * groups * state
    if meta.arch in _DELTA_NETS:
        return _rows(settings) * _F32 * (3 * channels + 3 * meta.n_embd + _INPUTS)
    projected = inner + channels + (integer(meta, "ssm.time_step_rank") if groups else 0)
    values = projected + 2 * channels + 2 * inner + 2 * meta.n_embd + _INPUTS
    return _rows(settings) * _F32 * values + settings.n_parallel * _F32 * state * inner


def _beside_attention(meta: ModelMeta, memory: KvBytes) -> int:
    """Return the values a token of a state space in the same layer as attention (Falcon-H1)."""
    if not any(layer.recurrent and layer.cells != "none" for layer in memory.layers):
        return 0
    inner, state, groups = (integer(meta, f"ssm.{key}") for key in ("inner_size", "state_size", "group_count"))
    channels = inner + 2 * groups * state
    return inner + 3 * channels + integer(meta, "ssm.time_step_rank")


def _encoder(meta: ModelMeta, memory: KvBytes, settings: Settings) -> int:
    """Return the bytes of an encoder: no gate in the feed-forward, no logits."""
    values = 2 * feed_forward(meta) + meta.n_embd + _INPUTS
    return _rows(settings) * _F32 * values + _mask(memory, settings, _F16)


def _device(meta: ModelMeta, memory: KvBytes, settings: Settings, all_logits: bool) -> int:
    """Return the bytes of the widest moment of a layer, beside the attention mask."""
    if meta.arch in ENCODERS:
        return _encoder(meta, memory, settings)
    rows, mask = _rows(settings), _mask(memory, settings, _F16)
    feed = rows * _F32 * _feed_values(meta) + mask
    attention = 0
    if any(layer.cells != "none" for layer in memory.layers):
        attention = rows * _F32 * _attention_values(meta) + mask
        if settings.flash_attention == "off":
            cells = slot_context(settings.n_ctx, settings.n_parallel)
            attention += rows * _F32 * meta.n_head * cells + _mask(memory, settings, _F32)
        elif settings.n_gpu_layers:
            unpacked = _unpacked_cache(memory, settings)
            attention += unpacked + (rows * _F32 * _beside_attention(meta, memory) if unpacked else 0)
        if settings.n_gpu_layers:  # CUDA's allocator finds no hole for them beside the scores or an unpacked cache
            attention += rows * _F32 * _expert_outputs(meta)
    recurrent = _recurrent_bytes(meta, memory, settings) + mask
    logits = 0
    if all_logits or settings.role != "chat":
        logits = rows * _F32 * ((meta.n_vocab or 0) + 4 * meta.n_embd + _INPUTS) + mask
    return max(feed, attention, recurrent, logits)


def _unpacked_cache(memory: KvBytes, settings: Settings) -> int:
    """Return the bytes of one layer's quantized cache in f16: CUDA's flash attention reads no other for a batch.

    Measured on an H200: the compute buffer grows by them (llama.cpp 0c1e57098).
    """
    if settings.kv_type_k in PLAIN_KV and settings.kv_type_v in PLAIN_KV:
        return 0
    cells = {"full": slot_context(settings.n_ctx, settings.n_parallel), "window": window_cells(memory, settings)}
    widest = max((cells.get(layer.cells, 0) * (layer.key + layer.value) for layer in memory.layers), default=0)
    return settings.n_parallel * widest * _F16


def _mask(memory: KvBytes, settings: Settings, size: int) -> int:
    if memory.layers and not any(layer.cells != "none" for layer in memory.layers):
        return 0  # recurrent alone
    cells = slot_context(settings.n_ctx, settings.n_parallel) + window_cells(memory, settings)
    return _rows(settings) * cells * size


def _output(meta: ModelMeta, settings: Settings) -> int:
    return settings.n_parallel * _F32 * (meta.n_vocab or 0)


def _rows(settings: Settings) -> int:
    return min(settings.n_ubatch, settings.n_batch, settings.n_ctx)


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
        meta, calibration = candidate.file.meta, _calibration(candidate, settings, inputs)
        compute = compute_bytes(meta, candidate.memory, settings, all_logits=inputs.all_logits)
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
    meta, memory = candidate.drafter.file.meta, candidate.drafter.memory
    compute = device_compute_bytes(meta, memory, drafting(settings), all_logits=inputs.all_logits)
    return drafter_bytes(candidate, settings) + compute


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
        # The tiny amount keeps 0.3 * 10 from being cut above 3.
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
    compute = device_compute_bytes(meta, candidate.memory, settings, all_logits=inputs.all_logits)
    fixed = int(compute * calibration.compute)
    copies = first or settings.cpu_expert_layers or weights.hosted_bytes
    copied = weights.largest_bytes if copies else 0
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
    compute = device_compute_bytes(candidate.file.meta, candidate.memory, settings, all_logits=inputs.all_logits)
    scale = _calibration(candidate, settings, inputs).compute
    kv = sum(cache_by_layer(candidate.memory, settings))
    return max(0, whole.required_bytes - layers - kv - int(compute * scale) - _context_bytes(inputs, inputs.host))


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
    compute = device_compute_bytes(meta, candidate.memory, settings, all_logits=inputs.all_logits)
    first, on_host = max(0, meta.n_layer + 1 - settings.n_gpu_layers), settings.cpu_expert_layers
    # For a large batch the GPU computes host weights too, from a copy in its compute buffer (--op-offload).
    copied = weights.largest_bytes if first or on_host or weights.hosted_bytes else 0
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
    host_compute = host_compute_bytes(meta, candidate.memory, settings)
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
