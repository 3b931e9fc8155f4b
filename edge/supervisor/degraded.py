"""Compare a started engine with its plan; each difference is a Degraded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from edge.linux.procfs import ProcessUsage
from edge.plan.plan import LaunchPlan
from edge.supervisor.placement import Buffers, idle_devices, misplaced_cache, misplaced_weights, on_device
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.status import Degraded, Failure
from edge.units import MIB, format_bytes

KV_LEAST = 0.9  # llama.cpp pads cells and rounds types: a tenth is no difference


class EngineFacts(Struct, frozen=True):
    """Facts that the log states. Sizes are in MiB, as llama.cpp prints them."""

    offloaded: tuple[int, int] | None = None  # n of m layers on the GPU
    devices: tuple[str, ...] = ()
    archs: tuple[int, ...] = ()  # of the engine's machine code, as in sm_87
    load_mode: str | None = None
    kv_mib: float | None = None  # all KV caches together
    kv_types: tuple[str, str] | None = None  # of K and V
    n_ctx: int | None = None  # of all slots
    buffers: Buffers = Buffers()
    projector_on: str | None = None  # the backend that reads images
    cpu_because: str | None = None  # why the GPU is not used


def differences(plan: LaunchPlan, facts: EngineFacts, props: object) -> tuple[Degraded, ...]:
    """Return the degradations. `props`: the document of /props, None without an answer; a list says nothing either."""
    shown = props if isinstance(props, Mapping) else {}
    found = [*_rung(plan), *_offload(plan, facts), *_devices(plan, facts), *_placed(plan, facts)]
    found += [*_kv(plan, facts, shown), *_load_mode(plan, facts), *_slots(plan, shown), *_context(plan, facts, shown)]
    return tuple(found)


def _rung(plan: LaunchPlan) -> list[Degraded]:
    if plan.rung == 0:
        return []
    because = next((r.because for r in plan.reasons if r.subject == "rung"), "the rungs above did not fit in memory")
    return [Degraded("rung", "0", str(plan.rung), because)]


def _offload(plan: LaunchPlan, facts: EngineFacts) -> list[Degraded]:
    wanted = plan.settings.n_gpu_layers
    if wanted <= 0:
        return []
    if facts.offloaded is not None:
        on_gpu, layers = facts.offloaded
        if on_gpu >= min(wanted, layers):
            return []
        because = facts.cpu_because or "the engine put the rest on the CPU"
        return [Degraded("n_gpu_layers", str(min(wanted, layers)), f"{on_gpu}/{layers}", because)]
    if on_device(plan, facts.buffers.weights) > 0:
        return []  # a build that does not print the offload line
    if facts.devices and not facts.buffers.weights:
        return [Degraded("device", "GPU", "unknown", "the engine lists it, and no line shows weights on it")]
    got = "CPU" if facts.buffers.weights or facts.cpu_because else "unknown"
    return [Degraded("device", "GPU", got, facts.cpu_because or "no line of the engine shows the GPU in use")]


def _devices(plan: LaunchPlan, facts: EngineFacts) -> list[Degraded]:
    """Report one of several GPUs that is missing; the others hold its share."""
    wanted = plan.settings.devices if plan.settings.n_gpu_layers > 0 else ()
    missing = [device for device in wanted if device not in facts.devices]
    if not facts.devices or not missing:
        idle = idle_devices(plan, facts.buffers.weights)
        because = f"{', '.join(idle)} holds no weights"
        used = ", ".join(device for device in wanted if device not in idle)
        return [Degraded("devices", ", ".join(wanted), used, because)] if idle else []
    return [Degraded("devices", ", ".join(wanted), ", ".join(facts.devices), f"{', '.join(missing)} is not there")]


def is_full(plan: LaunchPlan, facts: EngineFacts) -> bool:
    """Return whether the plan puts all layers on the GPU; unknown where the engine does not count them."""
    return facts.offloaded is not None and plan.settings.n_gpu_layers >= facts.offloaded[1]


def _placed(plan: LaunchPlan, facts: EngineFacts) -> list[Degraded]:
    """Report buffers that are not where the plan puts them."""
    full, buffers = is_full(plan, facts), facts.buffers
    weights = misplaced_weights(plan, buffers.weights, full=full)
    cache = misplaced_cache(plan, buffers, full=full)
    found = [each.degraded for each in ([weights] if weights else []) + cache]
    if plan.settings.n_gpu_layers > 0 and facts.projector_on == "CPU":
        found.append(Degraded("projector", "GPU", "CPU", "images are read on the CPU, which takes many times as long"))
    return found


def _kv(plan: LaunchPlan, facts: EngineFacts, props: Mapping[str, Any]) -> list[Degraded]:
    """Report a smaller cache than planned, unless context, slots and types are as requested.

    Then the estimate was too large: an architecture with a sliding window or shared layers that the planner does not
    know.
    """
    settings = plan.settings
    planned_mib = sum(domain.kv_bytes for domain in plan.budget.values()) / MIB
    wanted = (settings.kv_type_k, settings.kv_type_v)
    if facts.kv_types is not None and facts.kv_types != wanted:
        return [Degraded("kv_type", "/".join(wanted), "/".join(facts.kv_types), "the engine chose its own types")]
    if facts.kv_mib is None or facts.kv_mib >= planned_mib * KV_LEAST:
        return []
    n_ctx = facts.n_ctx or (_slot_n_ctx(props) or 0) * max(settings.n_parallel, 1)
    if n_ctx >= settings.n_ctx and facts.kv_types == wanted:
        return []
    return [Degraded("kv_cache", f"{planned_mib:.0f} MiB", f"{facts.kv_mib:.0f} MiB", "the engine made it smaller")]


def _load_mode(plan: LaunchPlan, facts: EngineFacts) -> list[Degraded]:
    """Report mapped weights where own memory was planned: the kernel may drop pages and reread them in an answer."""
    wanted = plan.settings.load_mode
    if facts.load_mode is None or not facts.load_mode.startswith("mmap") or wanted.startswith("mmap"):
        return []
    return [Degraded("load_mode", wanted, facts.load_mode, "the engine maps the file nevertheless")]


def _slots(plan: LaunchPlan, props: Mapping[str, Any]) -> list[Degraded]:
    """Compare `total_slots` of /props."""
    slots, wanted = props.get("total_slots"), plan.settings.n_parallel
    if not isinstance(slots, int) or isinstance(slots, bool) or slots == wanted:
        return []
    return [Degraded("n_parallel", str(wanted), str(slots), "the engine chose its own slots")]


def _context(plan: LaunchPlan, facts: EngineFacts, props: Mapping[str, Any]) -> list[Degraded]:
    """Compare the context of one slot: /props states it, and the log that of all slots."""
    slots = max(plan.settings.n_parallel, 1)
    wanted, got = plan.settings.n_ctx // slots, _slot_n_ctx(props)
    if got is None and facts.n_ctx is not None:
        got = facts.n_ctx // slots
    if got is None or got >= wanted:
        return []
    return [Degraded("n_ctx", f"{wanted} a slot", f"{got} a slot", "the engine shrank the context")]


def _slot_n_ctx(props: Mapping[str, Any]) -> int | None:
    settings = props.get("default_generation_settings")
    got = settings.get("n_ctx") if isinstance(settings, Mapping) else None
    return got if isinstance(got, int) and not isinstance(got, bool) else None


# Compare the memory of a serving engine with its plan. Pure.

# Estimates of compute buffers are off by up to a quarter; on small models a fixed amount (libraries, threads) is more.
GROWN_RATIO = 1.25
GROWN_BYTES = 256 * MIB
SWAPPED_BYTES = 64 * MIB  # less is pages of the start that are not used again


def grown(plan: LaunchPlan, vitals: ProcessUsage | None) -> tuple[Degraded, ...]:
    """Return growth and swapping as degradations, by the process's anonymous memory and swap.

    On a Jetson the kernel does not count GPU allocations for the process (FC-20).
    """
    domain = plan.budget.get("unified") or plan.budget.get("host")
    if vitals is None or domain is None:
        return ()
    found: list[Degraded] = []
    planned, taken = domain.required_bytes, vitals.rss_anon_bytes + vitals.swap_bytes
    if taken > planned * GROWN_RATIO + GROWN_BYTES:
        because = "the engine grew past its plan: prompt cache, checkpoints or a leak"
        found.append(Degraded("memory", format_bytes(planned), format_bytes(taken), because))
    if vitals.swap_bytes > SWAPPED_BYTES:
        got = format_bytes(vitals.swap_bytes)
        found.append(Degraded("swap", "none", got, "memory is short, and the engine slow: end other programs"))
    return tuple(found)


# Differences from the request that are known when a child is spawned. Pure.


def before_start(
    terms: SupervisorOptions, remedied: tuple[Degraded, ...], missing: Failure | None
) -> tuple[Degraded, ...]:
    """Return what is degraded before the start.

    `missing`: why the GPU is not used although the plan needs it; `remedied`: what remedies changed.
    """
    if missing is None:
        return (*terms.known, *remedied)
    what = ("device", "GPU", "CPU")
    if missing.kind.startswith("remote_"):
        what = ("rpc", "layers on other boards", "this board alone")
    return (*terms.known, Degraded(*what, f"{missing.kind}: {missing.hint}"), *remedied)


def refused(first: Degraded) -> Failure:
    """Return the failure of a start that `strict` refuses."""
    what = f"{first.subject}: wanted {first.wanted}, got {first.got} ({first.because})"
    return Failure("degraded", what, "strict = true refuses to serve this; see `edgellm plan`")
