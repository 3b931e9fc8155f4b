"""Build the ladder of one model: settings and memory of each step on a set of devices. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from edge.config.values import Preset
from edge.plan.choices import choice_for, chosen_mode, offload_of
from edge.plan.companions import draft_device, images_of, places
from edge.plan.inputs import HOST, Candidate, PlanInputs, device_sets, gpu_sets, in_one_batch, is_remote
from edge.plan.kv_cache import PLAIN_KV, checkpoint_bytes
from edge.plan.ladder_steps import LadderStep, context_levels, steps
from edge.plan.memory import budget, device_required, layer_split, repacked_bytes
from edge.plan.plan import MemoryBudget, Settings
from edge.units import MIB

# Build engine settings from a preset and one step of the ladder. Pure.

_MOST_CHECKPOINTS = 32  # llama-server's own default


def settings(preset: Preset, step: LadderStep, candidate: Candidate, role: str, inputs: PlanInputs) -> Settings:
    """Build engine settings; offload all layers where there is a GPU and the preset asks for it."""
    file = candidate.file
    rows = _pooled_rows(preset, step, candidate)
    offloaded = bool(inputs.gpus) and (preset.offload == "full" or bool(inputs.used_servers))
    chosen = Settings(
        n_ctx=step.n_ctx,
        n_parallel=step.n_parallel,
        n_gpu_layers=file.meta.n_layer + 1 if offloaded else 0,
        kv_type_k=step.kv_type_k,
        kv_type_v=step.kv_type_v,
        # A quantized V cache needs flash attention.
        flash_attention=preset.flash_attention if step.kv_type_v in PLAIN_KV else "on",
        load_mode="mmap",
        n_threads=preset.n_threads or inputs.threads,
        cache_ram_bytes=preset.cache_ram if role == "chat" and step.prompt_cache else 0,
        n_batch=min(preset.n_batch, step.n_ctx) if role == "chat" else rows,
        n_ubatch=min(preset.n_ubatch, preset.n_batch, step.n_ctx) if role == "chat" else rows,
        role=role,
        ui=bool(preset.ui) and role == "chat",
        mmproj=file.mmproj,
    )
    domain = inputs.gpus[0] if offloaded else inputs.host
    images = images_of(candidate, preset, chosen.flash_attention, inputs.room_bytes(domain), inputs.engine)
    chosen = on_gpus(preset, replace(chosen, images=images), candidate, inputs)
    chosen = replace(chosen, load_mode=load_mode(preset, chosen, candidate, inputs))
    return _with_checkpoints(chosen, candidate) if role == "chat" and candidate.memory.needs_checkpoints else chosen


def _pooled_rows(preset: Preset, step: LadderStep, candidate: Candidate) -> int:
    """Return the batch of an embedding model: the engine refuses an input that is longer."""
    slot = step.n_ctx // step.n_parallel
    return slot if in_one_batch(candidate.file.meta) else min(preset.n_ubatch, slot)


def load_mode(preset: Preset, chosen: Settings, candidate: Candidate, inputs: PlanInputs) -> str:
    """Return `none` or `dio` only when all weights leave the host: a host part could not be dropped (FC-19).

    On a CPU that repacks most of them a mapping would be a second copy: they are read without one there, too. A
    discrete GPU reads them from a mapping: an H200 was ready 0.4 to 0.6 s sooner with 8.72 GB in the page cache, and as
    soon without (docs/numbers.md).
    """
    full = chosen.n_gpu_layers > candidate.file.meta.n_layer
    repacked = not chosen.n_gpu_layers and 2 * repacked_bytes(candidate.weights, inputs) > candidate.weights.file_bytes
    if preset.load_mode in ("mmap", "none"):
        return preset.load_mode
    if preset.load_mode == "dio":
        return "dio" if full else "mmap"
    # What `edgellm bench load --apply` found for this file's disk and size.
    file, offload = candidate.file, offload_of(chosen.n_gpu_layers, candidate.file.meta.n_layer)
    measured = chosen_mode(inputs.load_choices, file.path, candidate.weights.file_bytes, offload)
    if measured is not None:
        return measured
    # WSL2: a drive of Windows is a 9p mount there, whose page faults cost a message each.
    mapped = inputs.discrete and not inputs.used_servers and inputs.board.container != "wsl2"
    return "none" if (full and not mapped) or repacked else "mmap"


def _with_checkpoints(chosen: Settings, candidate: Candidate) -> Settings:
    """Give half of the prompt cache to checkpoints, at least one: without, a hybrid model reads each prompt anew."""
    size = max(1, checkpoint_bytes(candidate.memory, chosen) * chosen.n_parallel)
    # Half: the other half stays for whole prompts, which save more where a request repeats one.
    count = min(_MOST_CHECKPOINTS, max(1, chosen.cache_ram_bytes // 2 // size))
    left = max(0, chosen.cache_ram_bytes - count * size)
    return replace(chosen, ctx_checkpoints=count, cache_ram_bytes=left // MIB * MIB)


def on_gpus(preset: Preset, chosen: Settings, candidate: Candidate, inputs: PlanInputs) -> Settings:
    """Set devices and split for the GPUs of `inputs`: by the preset's shares, else as evenly as whole layers allow."""
    if not chosen.n_gpu_layers:
        drafts = None if candidate.drafter is None else "none"
        return replace(chosen, devices=(), split_mode=None, tensor_split=(), rpc=(), draft_device=drafts)
    chosen = replace(chosen, draft_device=draft_device(candidate, inputs))
    if inputs.used_servers:
        return _with_servers(chosen, candidate, inputs)
    if not inputs.discrete or len(inputs.gpus) == 1:
        # "none": llama.cpp's default would put a context on every visible GPU.
        return replace(chosen, devices=("CUDA0",), split_mode="none" if inputs.discrete else None, tensor_split=())
    given = tuple(share for share in preset.tensor_split if share > 0)
    return replace(
        chosen,
        devices=tuple(f"CUDA{i}" for i in range(len(inputs.gpus))),
        split_mode=preset.split_mode,
        tensor_split=given if len(given) == len(inputs.gpus) else layer_split(candidate, chosen, inputs),
    )


def _with_servers(chosen: Settings, candidate: Candidate, inputs: PlanInputs) -> Settings:
    """Set devices and split for rpc-servers and the local GPUs. llama.cpp splits over servers by whole layers only."""
    own = iter(range(len(inputs.gpus)))
    names = tuple(gpu.partition("[")[0] if is_remote(gpu) else f"CUDA{next(own)}" for gpu in inputs.gpus)
    placed = replace(chosen, devices=names, split_mode="layer", rpc=inputs.used_servers)
    split = layer_split(candidate, placed, inputs) if len(names) > 1 else ()
    return replace(placed, tensor_split=split)


# Build the ladder of one model: as requested first, then with less and less of the deciding memory. Pure.

_MOST_RUNGS = 24  # enough for three files; a longer ladder only costs planning time


class Rung(Struct, frozen=True):
    """Settings and memory of one candidate on these GPUs, before they are rendered. `draft_on`: as in PlanInputs."""

    candidate: Candidate
    settings: Settings
    budget: MemoryBudget
    gpus: tuple[str, ...]
    draft_on: str | None = None

    @property
    def visible_gpus(self) -> tuple[str, ...]:
        """Return the GPUs of this board that the engine has to see, in its order: a drafter's own one is the last."""
        own = tuple(gpu for gpu in self.gpus if not is_remote(gpu))
        return (*own, self.draft_on) if self.draft_on in self.budget and self.draft_on not in (*own, HOST) else own

    @property
    def fits(self) -> bool:
        return all(domain.fits for domain in self.budget.values())

    @property
    def headroom_bytes(self) -> int:
        """Return the free bytes of the fullest domain; negative where it does not fit."""
        return min(domain.headroom_bytes for domain in self.budget.values())

    @property
    def device_headroom_bytes(self) -> int:
        """Return the free bytes of the fullest GPU, or of the host where no GPU is used."""
        return min(domain.headroom_bytes for name, domain in self.budget.items() if name in self.gpus or not self.gpus)


def cold_choice(preset: Preset, rung: Rung, inputs: PlanInputs) -> tuple[str, float] | None:
    """Return the load mode of a start that finds less than a share of the file in the page cache, and that share.

    None where no measurement found one sooner than the rung's own, or where the host lacks the memory for its buffers.
    Only for weights that all leave the host for its own GPUs: elsewhere the mode decides how much memory is taken.
    """
    chosen, file = rung.settings, rung.candidate.file
    full = chosen.n_gpu_layers > file.meta.n_layer and not chosen.cpu_expert_layers
    if preset.load_mode != "auto" or not full or not inputs.discrete or chosen.rpc:
        return None
    choice = choice_for(inputs.load_choices, file.path, rung.candidate.weights.file_bytes, "full")
    if choice is None or choice.cold_mode is None or choice.mode != chosen.load_mode:
        return None
    needed = budget(rung.candidate, replace(chosen, load_mode=choice.cold_mode), replace(inputs, gpus=rung.gpus))
    return (choice.cold_mode, choice.cold_below) if all(domain.fits for domain in needed.values()) else None


def walk_ladder(preset: Preset, candidates: Sequence[Candidate], role: str, inputs: PlanInputs) -> list[Rung]:
    """Return rungs that each need less of the deciding memory.

    `candidates`: the requested file, then smaller ones of the same model, then other models. A request's context is
    given up after everything else of a model: its smaller files come before a smaller context, so that more memory
    never means less context.
    """
    rungs: list[Rung] = []
    for rung in _rungs(preset, candidates, role, inputs):
        if not rungs or _needs_less(rung, rungs[-1], inputs):
            rungs.append(rung)
        if len(rungs) == _MOST_RUNGS:
            break
    if inputs.discrete and preset.partial_offload and rungs[-1].settings.n_gpu_layers:
        rungs += _partial(rungs[-1], preset, inputs)
    return rungs


def _needs_less(rung: Rung, before: Rung, inputs: PlanInputs) -> bool:
    """Return whether a rung is a step down: it fits where the one before does not, or needs less of its GPUs.

    One more GPU costs a CUDA context and brings more room: then the free bytes are compared, not the required ones.
    """
    if rung.fits != before.fits:
        return rung.fits
    if rung.gpus == before.gpus or (rung.gpus and set(rung.gpus) < set(before.gpus)):
        return device_required(rung.budget, inputs) < device_required(before.budget, inputs)
    return rung.device_headroom_bytes > before.device_headroom_bytes


def rungs_at(preset: Preset, candidate: Candidate, role: str, inputs: PlanInputs, context: int) -> Iterator[Rung]:
    """Yield the rungs of one file whose slots get `context` tokens, or what it was trained for."""
    parts = _parts(preset, candidate, inputs)
    for step in steps(preset, candidate.file.meta, context):
        yield _fitting(
            _placed(candidate, settings(preset, step, candidate, role, part), part, preset)
            for part in parts
            if _may_fit(candidate, preset, part) or part.gpus == parts[-1].gpus
        )


def _parts(preset: Preset, candidate: Candidate, inputs: PlanInputs) -> list[PlanInputs]:
    """Return the inputs of each set of devices to try; those with the drafter on the CPU come after all others."""
    sets = [replace(inputs, gpus=gpus) for gpus in device_sets(preset, inputs)]
    usable = _usable(preset, inputs)
    parts = [replace(part, draft_on=place) for part in sets for place in places(candidate, part, usable)]
    return sorted(parts, key=_drafts_on_host)


def _usable(preset: Preset, inputs: PlanInputs) -> PlanInputs:
    """Return the inputs without GPUs that no set has: a share of 0 in tensor_split."""
    used = {gpu for gpus in gpu_sets(preset, inputs) for gpu in gpus}
    return replace(inputs, gpus=tuple(gpu for gpu in inputs.gpus if gpu in used))


def _drafts_on_host(part: PlanInputs) -> bool:
    return part.draft_on == part.host and part.host not in part.gpus


def _rungs(preset: Preset, candidates: Sequence[Candidate], role: str, inputs: PlanInputs) -> Iterator[Rung]:
    for name in dict.fromkeys(candidate.file.name for candidate in candidates):
        files = [candidate for candidate in candidates if candidate.file.name == name]
        for context in context_levels(preset, files[0].file.meta.n_ctx_train):
            for candidate in files:
                yield from rungs_at(preset, candidate, role, inputs, context)


def _rung(candidate: Candidate, chosen: Settings, inputs: PlanInputs) -> Rung:
    gpus, draft_on = (inputs.gpus, inputs.draft_on) if chosen.n_gpu_layers else ((), None)
    return Rung(candidate, chosen, budget(candidate, chosen, inputs), gpus, draft_on)


def _placed(candidate: Candidate, chosen: Settings, inputs: PlanInputs, preset: Preset) -> Rung:
    """Return the rung; where a CPU and rpc-servers share a model that the servers alone do not hold, its best cut."""
    rung = _rung(candidate, chosen, inputs)
    if rung.fits or not inputs.used_servers or inputs.local_gpus:
        return rung
    counts = range(candidate.file.meta.n_layer, 0, -1)
    return _first_that_fits(counts, lambda count: _with_layers(preset, rung, count, inputs), inputs) or rung


def _fitting(rungs: Iterable[Rung]) -> Rung:
    """Return the first that fits, else the one that lacks least."""
    best: Rung | None = None
    for rung in rungs:
        if rung.fits:
            return rung
        # Kept for the error: it names the set of GPUs that came nearest.
        if best is None or rung.headroom_bytes > best.headroom_bytes:
            best = rung
    assert best is not None, "there is always a set of GPUs, if an empty one"
    return best


def _may_fit(candidate: Candidate, preset: Preset, inputs: PlanInputs) -> bool:
    """Return whether the weights alone may fit, a cheap bound: most sets of GPUs are too small for them."""
    if preset.offload != "full" or not inputs.discrete or inputs.used_servers:
        return True
    room = sum(inputs.room_bytes(gpu) for gpu in inputs.gpus)
    return room >= candidate.weights.file_bytes - candidate.weights.input_bytes


def _partial(last: Rung, preset: Preset, inputs: PlanInputs) -> Iterator[Rung]:
    """Yield rungs for discrete GPUs that keep a part on the host, each with less on the GPUs than the one before.

    The experts of as few layers as possible come first: they are most of a mixture's weights, and of each only a few
    are read for a token. Then whole layers, half of them, and none where the profile allows the CPU. A drafter gets
    what the layers leave.
    """
    parts = [replace(inputs, gpus=gpus) for gpus in gpu_sets(preset, inputs)]
    parts = [replace(part, draft_on=[*places(last.candidate, part, inputs)][-1]) for part in parts]
    experts = [rung for part in parts if (rung := _with_experts_on_host(preset, last, part))]
    layers = [rung for part in parts if (rung := _with_most_layers(preset, last, part))]
    found = []
    if experts:
        found.append(min(experts, key=lambda rung: rung.settings.cpu_expert_layers))
    if layers:
        most = max(layers, key=lambda rung: rung.settings.n_gpu_layers)
        # A spare rung: after an out-of-memory start the supervisor steps down, and a layer less is too little.
        half = most.settings.n_gpu_layers // 2
        same = replace(inputs, gpus=most.gpus, draft_on=most.draft_on)
        found += [most, *([_with_layers(preset, most, half, same)] if half else [])]
    before = last
    for rung in (_drafting_on_gpu(preset, each, inputs) for each in found):
        if _needs_less(rung, before, inputs):
            before = rung
            yield rung
    if preset.fallback == "cpu":
        yield _with_layers(preset, last, 0, inputs)


def _drafting_on_gpu(preset: Preset, rung: Rung, inputs: PlanInputs) -> Rung:
    """Return the rung with its drafter on a GPU that has room for it beside the layers there, if there is one."""
    part = replace(inputs, gpus=rung.gpus)
    for place in places(rung.candidate, part, _usable(preset, inputs)):
        there = replace(part, draft_on=place)
        moved = _rung(rung.candidate, on_gpus(preset, rung.settings, rung.candidate, there), there)
        if moved.fits:
            return moved
    return rung


def _with_experts_on_host(preset: Preset, last: Rung, inputs: PlanInputs) -> Rung | None:
    """Keep the experts of the fewest last layers on the host; None where that does not make all layers fit."""
    if not any(last.candidate.weights.experts) or not inputs.overrides_tensors:
        return None
    full = replace(last.settings, n_gpu_layers=last.candidate.file.meta.n_layer + 1, load_mode="mmap")

    def with_experts(count: int) -> Rung:
        chosen = replace(full, cpu_expert_layers=count)
        return _rung(last.candidate, on_gpus(preset, chosen, last.candidate, inputs), inputs)

    return _first_that_fits(range(1, last.candidate.file.meta.n_layer + 1), with_experts, inputs, last)


def _with_most_layers(preset: Preset, last: Rung, inputs: PlanInputs) -> Rung | None:
    counts = range(last.candidate.file.meta.n_layer, 0, -1)
    return _first_that_fits(counts, lambda count: _with_layers(preset, last, count, inputs), inputs, last)


def _first_that_fits(
    counts: Sequence[int], make: Callable[[int], Rung], inputs: PlanInputs, before: Rung | None = None
) -> Rung | None:
    """Return the rung of the first count that fits; the GPU memory that they need falls along `counts`.

    `before`: and needs less than this one. What stays on the host is computed from a copy on each GPU, so that one
    layer less may need more than all of them.
    """

    def fits(rung: Rung) -> bool:
        enough = all(domain.fits for name, domain in rung.budget.items() if name in rung.gpus)
        return enough and (before is None or not before.fits or _needs_less(rung, before, inputs))

    low, high = 0, len(counts) - 1
    # Bisection: a plan of 60 layers costs 6 estimates of memory, not 60.
    while low < high:
        middle = (low + high) // 2
        if fits(make(counts[middle])):
            high = middle
        else:
            low = middle + 1
    rung = make(counts[low])
    return rung if rung.fits and fits(rung) else None


def _with_layers(preset: Preset, rung: Rung, n_gpu_layers: int, inputs: PlanInputs) -> Rung:
    chosen = replace(rung.settings, n_gpu_layers=n_gpu_layers, load_mode="mmap", cpu_expert_layers=0)
    return _rung(rung.candidate, on_gpus(preset, chosen, rung.candidate, inputs), inputs)
