"""Why each setting has its value, in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edge.model.file import ModelFile
from edge.plan.kv import checkpoint_bytes
from edge.plan.plan import Reason, Settings
from edge.plan.situation import Situation
from edge.plan.subject import Subject
from edge.profile.profile import Wishes
from edge.units import MIB, format_bytes

_PLAIN_KV = ("f32", "f16", "bf16")


def reasons(
    chosen: Settings,
    wishes: Wishes,
    role: str,
    subject: Subject,
    wanted: ModelFile,
    place: Situation,
    origins: Mapping[str, str],
) -> tuple[Reason, ...]:
    """In the order of the printed plan. `origins` names, by key, the layer that a wish came from; `role` was wished."""

    def reason(subject: str, value: object, because: str, key: str | None = None) -> Reason:
        return Reason(subject, str(value), because, origins.get(key, "default") if key else "planner")

    n_layer = subject.file.meta.n_layer
    fewer = chosen.n_parallel < wishes.n_parallel
    shrunk = fewer or chosen.n_ctx < wishes.n_ctx
    dropped = bool(wishes.cache_ram) and not chosen.cache_ram_bytes
    found = [
        _model(subject.file, wanted),
        reason("n_ctx", chosen.n_ctx, _context(chosen, wishes, subject.file), None if shrunk else "n_ctx"),
        reason("n_parallel", chosen.n_parallel, _slots(chosen, wishes), None if fewer else "n_parallel"),
        reason("n_gpu_layers", f"{chosen.n_gpu_layers}/{n_layer + 1}", _offload(chosen, n_layer, wishes, place)),
        reason("kv_type", _kv(chosen), _kv_reason(chosen, wishes), "kv_type_k" if _kv_wished(chosen, wishes) else None),
        reason("flash_attention", chosen.flash_attention, _flash(chosen, wishes), "flash_attention"),
        reason(
            "load_mode",
            chosen.load_mode,
            _load(chosen, n_layer, wishes),
            None if wishes.load_mode == "auto" else "load_mode",
        ),
        reason("n_threads", chosen.n_threads, _threads(wishes, place), "n_threads"),
        reason(
            "cache_ram",
            f"{chosen.cache_ram_bytes // MIB} MiB",
            _cache(chosen, wishes),
            None if dropped else "cache_ram",
        ),
    ]
    return (*found, *_special(chosen, wishes, role, subject, place, reason))


def _special(
    chosen: Settings, wishes: Wishes, role: str, subject: Subject, place: Situation, reason: Callable[..., Reason]
) -> list[Reason]:
    """What only some models or machines have."""
    found: list[Reason] = []
    if chosen.role != role:
        found.append(reason("role", chosen.role, "the file pools its output: it cannot chat"))
    if chosen.ctx_checkpoints:
        each = format_bytes(checkpoint_bytes(subject.memory, chosen))
        why = f"snapshots of {each} that let a prompt be reused; the engine would keep 32"
        found.append(reason("ctx_checkpoints", chosen.ctx_checkpoints, why))
    if chosen.tensor_split:
        split = ", ".join(f"{share:g}" for share in chosen.tensor_split)
        given = len(wishes.tensor_split) == len(place.gpus)
        found.append(reason("tensor_split", split, "as wished" if given else "free memory of each GPU, in GiB"))
    return found


def _model(file: ModelFile, wanted: ModelFile) -> Reason:
    size = f"{file.bytes / 1e9:.2f} GB"
    if file is not wanted:
        size += f", because {wanted.name} {wanted.quant} does not fit"
    return Reason("model", f"{file.name} {file.quant}", size, "model")


def _context(chosen: Settings, wishes: Wishes, file: ModelFile) -> str:
    slot, trained = chosen.n_ctx // chosen.n_parallel, file.meta.n_ctx_train
    share = f"{slot} tokens a slot, " if chosen.n_parallel > 1 else ""
    if trained and slot >= trained:
        return f"{share}all that the model was trained for"
    wished = (wishes.n_ctx or trained) // wishes.n_parallel
    if slot < wished:
        return f"{share}less than the {wished} wished, so that it fits; the model was trained for {trained}"
    return f"{share}as wished; the model was trained for {trained}"


def _slots(chosen: Settings, wishes: Wishes) -> str:
    if chosen.n_parallel < wishes.n_parallel:
        return f"fewer than the {wishes.n_parallel} wished, so that it fits"
    return "one request at a time" if chosen.n_parallel == 1 else "requests at once"


def _offload(chosen: Settings, n_layer: int, wishes: Wishes, place: Situation) -> str:
    if chosen.n_gpu_layers > n_layer:
        return f"everything on {', '.join(chosen.devices)}"
    if chosen.n_gpu_layers:
        return "as many layers as fit; the rest runs on the CPU, slower"
    if place.board.refused:
        return "its GPU cannot be used"
    if place.gpus:
        return "the GPU is not used, as wished" if wishes.offload == "none" else "the GPU's memory is too small"
    return "this engine has no CUDA" if place.board.gpus else "no GPU here"


def _kv(chosen: Settings) -> str:
    same = chosen.kv_type_k == chosen.kv_type_v
    return chosen.kv_type_k if same else f"{chosen.kv_type_k}/{chosen.kv_type_v}"


def _kv_reason(chosen: Settings, wishes: Wishes) -> str:
    return "as wished" if _kv_wished(chosen, wishes) else "a smaller cache, so that it fits"


def _kv_wished(chosen: Settings, wishes: Wishes) -> bool:
    return (chosen.kv_type_k, chosen.kv_type_v) == (wishes.kv_type_k, wishes.kv_type_v)


def _flash(chosen: Settings, wishes: Wishes) -> str:
    needed = chosen.kv_type_v not in _PLAIN_KV and wishes.flash_attention != "on"
    return "a quantized V cache needs it" if needed else "as wished"


def _load(chosen: Settings, n_layer: int, wishes: Wishes) -> str:
    if wishes.load_mode == chosen.load_mode:
        return "as wished"
    if chosen.load_mode == "mmap" and chosen.n_gpu_layers:
        return "a part stays on the host, where mapped pages can be dropped and others cannot"
    if chosen.load_mode == "mmap":
        return "the next start finds the weights in the page cache"
    return "all weights go to the GPU: a mapping would keep them twice" if chosen.n_gpu_layers > n_layer else "no mmap"


def _threads(wishes: Wishes, place: Situation) -> str:
    return "as wished" if wishes.n_threads else f"one for each of {place.board.cpu.physical_cores} physical cores"


def _cache(chosen: Settings, wishes: Wishes) -> str:
    if wishes.cache_ram and not chosen.cache_ram_bytes and chosen.role == "chat":
        return "no prompt cache, so that it fits"
    if not chosen.cache_ram_bytes:
        return "prompt cache off; the engine would take up to 8 GiB of host memory"
    return "prompts that can be kept; the engine would take up to 8 GiB of host memory"
