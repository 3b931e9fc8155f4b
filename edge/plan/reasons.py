"""Explain each setting of a plan in one sentence. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from edge.config.values import ModelConfig, Preset, Profile
from edge.errors import DoesNotFitError
from edge.models.open import ModelFile
from edge.plan.choices import offload_of
from edge.plan.engine_options import CHAT_KEYS
from edge.plan.inputs import PlanInputs
from edge.plan.kv_cache import BLOCKS, PLAIN_KV, checkpoint_bytes
from edge.plan.ladder import Rung
from edge.plan.plan import ColdStart, DomainBudget, MemoryBudget, Reason, Settings
from edge.units import GIB, MIB, format_bytes


def reasons(
    rung: Rung, preset: Preset, role: str, wanted: ModelFile, inputs: PlanInputs, origins: Mapping[str, str]
) -> tuple[Reason, ...]:
    """Return the reasons in the order of the printed plan.

    `role` is the requested one, `wanted` the requested file; `origins`: by key, the layer that set it.
    """
    chosen, file = rung.settings, rung.candidate.file

    def reason(subject: str, value: object, because: str, key: str | None = None) -> Reason:
        return Reason(subject, str(value), because, origins.get(key, "default") if key else "planner")

    n_layer = file.meta.n_layer
    fewer = chosen.n_parallel < preset.n_parallel
    shrunk = chosen.n_ctx // chosen.n_parallel < preset.n_ctx
    kv_types = (chosen.kv_type_k, chosen.kv_type_v)
    kv_given = kv_types == (preset.kv_type_k, preset.kv_type_v)
    kv_why = "as requested" if kv_given else "a smaller cache, so that it fits"
    load_key = None if preset.load_mode == "auto" else "load_mode"
    cache, dropped = f"{chosen.cache_ram_bytes // MIB} MiB", preset.cache_ram and not chosen.cache_ram_bytes
    found = [
        _model(file, wanted),
        reason("n_ctx", chosen.n_ctx, _context(chosen, preset, file), None if shrunk else "n_ctx"),
        reason("n_parallel", chosen.n_parallel, _slots(chosen, preset), None if fewer else "n_parallel"),
        reason("n_gpu_layers", f"{chosen.n_gpu_layers}/{n_layer + 1}", _offload(chosen, n_layer, preset, inputs)),
        reason("kv_type", "/".join(dict.fromkeys(kv_types)), kv_why, "kv_type_k" if kv_given else None),
        reason("flash_attention", chosen.flash_attention, _flash(chosen, preset), "flash_attention"),
        reason("load_mode", chosen.load_mode, _load(chosen, n_layer, preset, inputs), load_key),
        reason("n_threads", chosen.n_threads, _threads(preset, inputs), "n_threads"),
        reason("cache_ram", cache, _cache(chosen, preset), None if dropped else "cache_ram"),
    ]
    return (*found, *_special(rung, preset, role, inputs, reason))


def _special(rung: Rung, preset: Preset, role: str, inputs: PlanInputs, reason: Callable[..., Reason]) -> list[Reason]:
    """Explain what only some models or machines have."""
    chosen, candidate = rung.settings, rung.candidate
    found: list[Reason] = []
    if chosen.role != role:
        found.append(reason("role", chosen.role, "the file pools its output: it cannot chat"))
    if chosen.ctx_checkpoints:
        each = format_bytes(checkpoint_bytes(candidate.memory, chosen))
        why = f"snapshots of {each} that let a prompt be reused; the engine would keep 32"
        found.append(reason("ctx_checkpoints", chosen.ctx_checkpoints, why))
    if chosen.rpc:
        why = "it does not fit on this board alone: layers on other boards, over a network without authentication"
        found.append(reason("rpc", ", ".join(chosen.rpc), why))
    elif chosen.n_gpu_layers and len(rung.visible_gpus) < len(inputs.gpus):
        found.append(reason("gpus", _names(rung.visible_gpus, inputs), _left_out(rung.visible_gpus, preset, inputs)))
    if chosen.draft_device:
        found.append(reason("draft_device", chosen.draft_device, _drafts_on(rung, inputs)))
    if chosen.images and chosen.images.max_tokens:
        projector = candidate.file.projector
        flash = chosen.flash_attention != "off"
        whole = projector.compute_bytes(flash_attention=flash) if projector else 0
        why = f"an image; a larger one is scaled down: without a limit it could take {format_bytes(whole)}"
        found.append(reason("image_max_tokens", chosen.images.max_tokens, why))
    if chosen.cpu_expert_layers:
        n_layer = candidate.file.meta.n_layer
        why = "the experts of these layers run on the CPU, so that every layer's attention stays on the GPU"
        found.append(reason("cpu_experts", f"last {chosen.cpu_expert_layers} of {n_layer} layers", why))
    if chosen.tensor_split:
        split = ", ".join(f"{share:g}" for share in chosen.tensor_split)
        given = chosen.tensor_split == tuple(share for share in preset.tensor_split if share > 0)
        found.append(reason("tensor_split", split, "as requested" if given else "layers of each GPU, by its memory"))
    return found


def _names(gpus: Iterable[str], inputs: PlanInputs) -> str:
    named = {str(gpu.uuid): gpu.name for gpu in inputs.board.gpus}
    return ", ".join(named.get(gpu, gpu) for gpu in gpus)


def _drafts_on(rung: Rung, inputs: PlanInputs) -> str:
    place = rung.draft_on or inputs.host
    if rung.settings.draft_device != "none":
        beside = "beside the model" if place in rung.gpus else "and the GPUs of the model have none"
        return f"{_names([place], inputs)} has room for the drafter, {beside}"
    if not rung.gpus:
        return "the drafter is on the CPU, as the model is"
    return "no GPU has room for the drafter beside the model: it runs on the CPU, slower"


def _left_out(gpus: Sequence[str], preset: Preset, inputs: PlanInputs) -> str:
    others = _names((gpu for gpu in inputs.gpus if gpu not in gpus), inputs)
    if len(preset.tensor_split) == len(inputs.gpus):
        return f"without {others}, as requested by tensor_split"
    return f"without {others}: fewer GPUs are enough, and each one more would only add a CUDA context"


def _model(file: ModelFile, wanted: ModelFile) -> Reason:
    size = f"{file.bytes / 1e9:.2f} GB"
    beside = (("projector", file.mmproj_bytes), ("adapters", file.adapter_bytes), ("drafter", file.drafter_bytes))
    size += "".join(f", {name} {count / 1e9:.2f} GB" for name, count in beside if count)
    if file is not wanted:
        size += f", because {wanted.name} {wanted.quant} does not fit"
    return Reason("model", f"{file.name} {file.quant}", size, "model")


def _context(chosen: Settings, preset: Preset, file: ModelFile) -> str:
    slot, trained = chosen.n_ctx // chosen.n_parallel, file.meta.n_ctx_train
    share = f"{slot} tokens a slot, " if chosen.n_parallel > 1 else ""
    if trained and slot > trained:
        return f"{share}as requested; trained for {trained}, times {preset.rope_scale:g} by {preset.rope_scaling}"
    if trained and slot >= trained:
        return f"{share}all that the model was trained for"
    requested = preset.n_ctx or trained
    if slot < requested:
        return f"{share}less than the {requested} requested, so that it fits; the model was trained for {trained}"
    return f"{share}as requested; the model was trained for {trained}"


def _slots(chosen: Settings, preset: Preset) -> str:
    if chosen.n_parallel < preset.n_parallel:
        return f"fewer than the {preset.n_parallel} requested, so that it fits"
    return "one request at a time" if chosen.n_parallel == 1 else "requests at once"


def _offload(chosen: Settings, n_layer: int, preset: Preset, inputs: PlanInputs) -> str:
    if chosen.n_gpu_layers > n_layer:
        return f"everything on {', '.join(chosen.devices)}"
    if chosen.n_gpu_layers:
        return "as many layers as fit; the rest runs on the CPU, slower"
    if inputs.board.refused:
        return "its GPU cannot be used"
    if inputs.gpus:
        return "the GPU is not used, as requested" if preset.offload == "none" else "the GPU's memory is too small"
    return "this engine has no CUDA" if inputs.board.gpus else "no GPU here"


def _flash(chosen: Settings, preset: Preset) -> str:
    needed = chosen.kv_type_v not in PLAIN_KV and preset.flash_attention != "on"
    return "a quantized V cache needs it" if needed else "as requested"


def cold_reasons(cold: ColdStart | None) -> tuple[Reason, ...]:
    """Explain the load mode of a start that finds little of the file in the page cache."""
    if cold is None:
        return ()
    because = f"while less than {cold.below:.0%} of the file is in the page cache: measured by `edgellm bench load`"
    return (Reason("load_mode, cold", cold.load_mode, because),)


def _load(chosen: Settings, n_layer: int, preset: Preset, inputs: PlanInputs) -> str:
    if preset.load_mode == chosen.load_mode:
        return "as requested"
    measured = {(each.offload, each.mode) for each in inputs.load_choices}
    if preset.load_mode == "auto" and (offload_of(chosen.n_gpu_layers, n_layer), chosen.load_mode) in measured:
        return "measured by `edgellm bench load`"
    if chosen.load_mode == "mmap" and chosen.n_gpu_layers > n_layer and not chosen.cpu_expert_layers:
        return "a GPU is sooner ready from a mapped file in the page cache, and as soon without"
    if chosen.load_mode == "mmap" and chosen.n_gpu_layers:
        return "a part stays on the host, where mapped pages can be dropped and others cannot"
    if chosen.load_mode == "mmap":
        return "the next start finds the weights in the page cache"
    if chosen.n_gpu_layers > n_layer:
        return "all weights go to the GPU: a mapping would keep them twice"
    return "the engine repacks the weights for this CPU: a mapping would keep them twice"


def _threads(preset: Preset, inputs: PlanInputs) -> str:
    cpu = inputs.board.cpu
    if preset.n_threads:
        return "as requested"
    if cpu.usable_cores:
        return f"one for each of {cpu.usable_cores} usable cores"
    busy = cpu.physical_cores - inputs.threads
    beside = f", less {busy} that other processes keep busy" if busy > 0 else ""
    return f"one for each of {cpu.physical_cores} physical cores{beside}"


def _cache(chosen: Settings, preset: Preset) -> str:
    if preset.cache_ram and not chosen.cache_ram_bytes and chosen.role == "chat":
        return "no prompt cache, so that it fits"
    if not chosen.cache_ram_bytes:
        return "prompt cache off; the engine would take up to 8 GiB of host memory"
    return "prompts that can be kept; the engine would take up to 8 GiB of host memory"


def no_template(file: ModelFile, role: str) -> tuple[str, ...]:
    """Warn of a file without a chat template: the engine takes ChatML, and answers look odd (FC-88)."""
    if role != "chat" or file.meta.chat_template:
        return ()
    return ("the file has no chat template: the engine takes a general one, and tools may not work",)


def without_effect(
    own: Mapping[str, Any], config: ModelConfig, preset: Preset, role: str, profile: Profile
) -> Iterator[str]:
    """Warn of settings that do nothing for this model: overruled by its own, or of another role than its own."""
    for key, value in own.items():
        origin = profile.origins.get(key, "")
        here = origin in ("flag", "--set") or origin.startswith("env ")
        if here and getattr(profile.preset, key) != value:
            given = "the command line" if origin == "flag" else origin
            yield f"{key} of {given} has no effect on this model: {config.origin or 'its table'} sets its own"
        if role != "chat" and key in CHAT_KEYS and value != getattr(Preset(), key):
            yield f"{key} has no effect: the model does not chat, its role is {role}"
    if role == "chat" and preset.pooling != Preset().pooling:
        yield 'pooling has no effect: the model chats; role = "embedding" in [[model]] serves embeddings'


# Build the error for a model that does not fit: the memory table and the three cheapest ways out. Pure.

_PARTS = ("weights", "kv", "compute", "context", "prompt_cache", "page_cache")
_DESKTOP_BYTES = GIB  # an Orin Nano 8GB has 6.4 GB available headless, 5.2 GB with the desktop


def does_not_fit(model_id: str, rung: Rung, preset: Preset) -> DoesNotFitError:
    """Return the error for `rung`, the smallest that the profile allows."""
    name, domain = min(rung.budget.items(), key=lambda item: item[1].headroom_bytes)
    missing = -domain.headroom_bytes
    file = rung.candidate.file
    message = (
        f"{model_id} ({file.name} {file.quant}) does not fit: even with {rung.settings.n_ctx} tokens of context "
        f"{format_bytes(missing)} of {name} memory are missing"
    )
    hint = "; or ".join(ways_out(rung, domain, preset)[:3])
    return DoesNotFitError(message, hint, table=table(rung.budget))


def ways_out(rung: Rung, domain: DomainBudget, preset: Preset) -> list[str]:
    """Return what would help: first, cheapest first, what is enough by itself."""
    missing, settings = -domain.headroom_bytes, rung.settings
    ways: list[tuple[int, str]] = []
    if settings.cache_ram_bytes and domain.prompt_cache_bytes:
        ways.append((settings.cache_ram_bytes, "no prompt cache: --set cache_ram=0"))
    if preset.kv_type_min != "q4_0" and settings.flash_attention != "off" and domain.kv_bytes:
        now, least = (size / count for size, count in (BLOCKS[settings.kv_type_k], BLOCKS["q4_0"]))
        ways.append((int(domain.kv_bytes * (1 - least / now)), "a smaller KV cache: --set kv_type_min=q4_0"))
    # A quarter of it has to be a context still: llama.cpp pads one to 256 tokens.
    slot = settings.n_ctx // settings.n_parallel
    if slot > 1024:
        # The cache is linear in the tokens: a quarter of the context frees three quarters.
        ways.append((domain.kv_bytes * 3 // 4, f"a smaller context: --set n_ctx_min={slot // 4}"))
    # Half at most: with none the kernel would reclaim the mapped weights themselves.
    reserve = domain.reserve_bytes // 2
    ways.append((reserve, f"a smaller reserve: --set reserve={reserve // 1024**2}MiB"))
    if missing <= _DESKTOP_BYTES:
        ways.append((missing, f"free {format_bytes(missing)}: end other programs, or boot without the desktop"))
    ways.append((missing, f"a model that is {format_bytes(missing)} smaller: `edgellm model list`"))
    # One way that is enough by itself is a better next step than two that have to be combined.
    enough = [text for saved, text in ways if saved >= missing]
    return enough + [f"{text} (saves {format_bytes(saved)})" for saved, text in ways if saved < missing]


def table(budget: MemoryBudget) -> str:
    """Return a text table: bytes by part, one column a domain."""
    rows = [["", *budget]]
    claim = ("claim",) if any(domain.claim_bytes for domain in budget.values()) else ()
    for part in (*_PARTS, *claim, "required", "reserve", "available", "headroom"):
        cells = [format_bytes(getattr(domain, f"{part}_bytes")) for domain in budget.values()]
        rows.append([part.replace("_", " "), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        padded = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"  {label.ljust(widths[0])}  {padded}")
    return "\n".join(lines)
