"""Step down from the preset: smaller KV type, smaller context, fewer slots, no prompt cache. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from edge.config.values import Preset
from edge.models.meta import ModelMeta
from edge.plan.inputs import Candidate, PlanInputs, in_one_batch
from edge.plan.kv_cache import BLOCKS, checkpoint_bytes, slot_context
from edge.plan.memory import budget, device_required
from edge.plan.plan import MemoryBudget, Settings
from edge.units import GIB, MIB

_KV_STEPS = ("q8_0", "q4_0")


class LadderStep(Struct, frozen=True):
    """The settings that one rung changes. `n_ctx` is over all slots."""

    n_ctx: int
    n_parallel: int
    kv_type_k: str
    kv_type_v: str
    prompt_cache: bool = True


def steps(preset: Preset, meta: ModelMeta) -> Iterator[LadderStep]:
    """Yield steps from the preset to its limits, each with less memory than the one before."""
    slots = preset.n_parallel
    per_slot = requested_slot_context(preset, meta)
    least = min(per_slot, max(256, preset.n_ctx_min))
    key, value = str(preset.kv_type_k), str(preset.kv_type_v)
    yield LadderStep(per_slot * slots, slots, key, value)
    for smaller in _KV_STEPS:
        if bits(smaller) < bits(preset.kv_type_min):
            break
        # A quantized V cache needs flash attention.
        new = (_least(key, smaller), value if preset.flash_attention == "off" else _least(value, smaller))
        if new != (key, value):
            key, value = new
            yield LadderStep(per_slot * slots, slots, key, value)
    while per_slot > least:
        per_slot = max(least, slot_context(per_slot // 2, 1))
        yield LadderStep(per_slot * slots, slots, key, value)
    while slots > 1:
        slots //= 2
        yield LadderStep(per_slot * slots, slots, key, value)
    if preset.cache_ram:
        yield LadderStep(per_slot * slots, slots, key, value, prompt_cache=False)


def requested_slot_context(preset: Preset, meta: ModelMeta) -> int:
    """Return the tokens of one slot: as requested, never above the trained context (FC-22)."""
    trained = meta.n_ctx_train or 1 << 24
    wanted = slot_context(preset.n_ctx, preset.n_parallel) if preset.n_ctx else trained
    return slot_context(min(wanted, trained), 1)


def bits(kind: str) -> float:
    """Return the bits per value of a KV type."""
    size, count = BLOCKS[kind]
    return 8 * size / count


def _least(one: str, other: str) -> str:
    return one if bits(one) <= bits(other) else other


# Build engine settings from a preset and one step of the ladder. Pure.

_PLAIN_KV = ("f32", "f16", "bf16")
_MOST_CHECKPOINTS = 32  # llama-server's own default


def settings(preset: Preset, step: LadderStep, candidate: Candidate, role: str, inputs: PlanInputs) -> Settings:
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


def _pooled_rows(preset: Preset, step: LadderStep, candidate: Candidate) -> int:
    """Return the batch of an embedding model: the engine refuses an input that is longer."""
    slot = step.n_ctx // step.n_parallel
    return slot if in_one_batch(candidate.file.meta) else min(preset.n_ubatch, slot)


def load_mode(preset: Preset, chosen: Settings, n_layer: int) -> str:
    """Return `none` or `dio` only when all weights leave the host: a host part could not be dropped (FC-19)."""
    full = chosen.n_gpu_layers > n_layer
    if preset.load_mode in ("mmap", "none"):
        return preset.load_mode
    if preset.load_mode == "dio":
        return "dio" if full else "mmap"
    return "none" if full else "mmap"


def _with_checkpoints(chosen: Settings, candidate: Candidate) -> Settings:
    """Give half of the prompt cache to checkpoints, at least one: without, a hybrid model reads each prompt anew."""
    size = max(1, checkpoint_bytes(candidate.memory, chosen) * chosen.n_parallel)
    count = min(_MOST_CHECKPOINTS, max(1, chosen.cache_ram_bytes // 2 // size))
    left = max(0, chosen.cache_ram_bytes - count * size)
    return replace(chosen, ctx_checkpoints=count, cache_ram_bytes=left // MIB * MIB)


def _tensor_split(preset: Preset, inputs: PlanInputs) -> tuple[float, ...]:
    """Return the free memory of each GPU in GiB: llama.cpp takes proportions."""
    if len(preset.tensor_split) == len(inputs.gpus):
        return preset.tensor_split
    free = (inputs.available_bytes[gpu] - inputs.reserve_bytes[gpu] for gpu in inputs.gpus)
    return tuple(max(0.1, round(size / GIB, 1)) for size in free)


# Build the ladder of one model: as requested first, then with less and less of the deciding memory. Pure.

_MOST_RUNGS = 16  # enough for three files; a longer ladder only costs planning time


class Rung(Struct, frozen=True):
    """Settings and memory of one candidate, before they are rendered."""

    candidate: Candidate
    settings: Settings
    budget: MemoryBudget

    @property
    def fits(self) -> bool:
        return all(domain.fits for domain in self.budget.values())


def walk_ladder(preset: Preset, candidates: Sequence[Candidate], role: str, inputs: PlanInputs) -> list[Rung]:
    """Return rungs that each need less of the deciding memory. `candidates`: the requested file, then smaller ones."""
    rungs: list[Rung] = []
    for rung in _candidates(preset, candidates, role, inputs):
        if not rungs or device_required(rung.budget, inputs) < device_required(rungs[-1].budget, inputs):
            rungs.append(rung)
        if len(rungs) == _MOST_RUNGS:
            break
    if inputs.discrete and preset.partial_offload and rungs[-1].settings.n_gpu_layers:
        rungs += _partial(rungs[-1], preset, inputs)
    return rungs


def _candidates(preset: Preset, candidates: Sequence[Candidate], role: str, inputs: PlanInputs) -> Iterator[Rung]:
    for candidate in candidates:
        for step in steps(preset, candidate.file.meta):
            chosen = settings(preset, step, candidate, role, inputs)
            yield Rung(candidate, chosen, budget(candidate, chosen, inputs))


def _partial(last: Rung, preset: Preset, inputs: PlanInputs) -> Iterator[Rung]:
    """Yield rungs for discrete GPUs: as many layers as fit, half of them, none where the profile allows the CPU."""
    full, needed = last.settings.n_gpu_layers, device_required(last.budget, inputs)
    most = next((n for n in range(full - 1, 0, -1) if _with_layers(last, n, inputs).fits), full // 2)
    for count in dict.fromkeys((most, most // 2)):
        rung = _with_layers(last, count, inputs)
        if count and device_required(rung.budget, inputs) < needed:
            needed = device_required(rung.budget, inputs)
            yield rung
    if preset.fallback == "cpu":
        yield _with_layers(last, 0, inputs)


def _with_layers(rung: Rung, n_gpu_layers: int, inputs: PlanInputs) -> Rung:
    chosen = replace(rung.settings, n_gpu_layers=n_gpu_layers, load_mode="mmap")
    if n_gpu_layers == 0:
        chosen = replace(chosen, devices=(), split_mode=None, tensor_split=())
    return replace(rung, settings=chosen, budget=budget(rung.candidate, chosen, inputs))
