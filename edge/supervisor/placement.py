"""Judge where an engine put weights, KV cache and compute buffers, against the plan and per device. Pure.

The device list and the layer count are claims; the buffer lines are allocations, so they decide.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from edge.plan.plan import LaunchPlan
from edge.supervisor.status import Degraded

# With all layers on the GPU the input embeddings alone stay in host memory (llama-model.cpp: the input layer is on the
# CPU). They are no larger than the output tensor, which is on the GPU: at least half of the weights are there.
FULL_SHARE = 0.5
HOST_SHARE = 0.1  # of the KV cache; rounding and padding are less


class Buffers(Struct, frozen=True):
    """Sizes of buffers in MiB by llama.cpp's buffer name: CUDA0, CPU_Mapped, CUDA_Host, Vulkan0."""

    weights: Mapping[str, float] = {}
    kv: Mapping[str, float] = {}
    compute: Mapping[str, float] = {}


class Misplaced(Struct, frozen=True):
    """A buffer that is not where the plan puts it. `absent`: the planned devices hold nothing of it."""

    gate: str
    degraded: Degraded
    absent: bool = False


def add(sizes: Mapping[str, float], name: str, mib: float) -> dict[str, float]:
    """Return the sizes with one more buffer of that name: models with several caches have several."""
    return {**sizes, name: sizes.get(name, 0.0) + mib}


def is_host(name: str) -> bool:
    """Return whether a buffer of that name is in host memory. CUDA_Host is pinned, which only speeds up copies."""
    return name == "CPU" or name.startswith("CPU_") or name.endswith("_Host")


def on_device(plan: LaunchPlan, sizes: Mapping[str, float]) -> float:
    """Return the MiB on the planned devices; on any CUDA device where the plan names none."""
    planned = plan.settings.devices
    return sum(
        mib
        for name, mib in sizes.items()
        if not is_host(name) and (name.startswith("CUDA") if not planned else name.startswith((*planned, "CUDA_Split")))
    )


def misplaced_weights(plan: LaunchPlan, sizes: Mapping[str, float], *, full: bool) -> Misplaced | None:
    """Judge the weights. `full`: all layers were planned on the GPU. None where they are as planned, or not printed."""
    total, placed = sum(sizes.values()), on_device(plan, sizes)
    if plan.settings.n_gpu_layers <= 0 or total <= 0 or (placed > 0 and (not full or placed >= FULL_SHARE * total)):
        return None
    found = Degraded("weights", _wanted(plan), _where(sizes), "the engine put them there")
    return Misplaced("backend", found, absent=placed <= 0)


def misplaced_cache(plan: LaunchPlan, buffers: Buffers, *, full: bool) -> list[Misplaced]:
    """Judge KV cache and compute buffers of an engine whose weights are on the GPU."""
    if plan.settings.n_gpu_layers <= 0:
        return []
    found = []
    kv, compute = buffers.kv, buffers.compute
    if kv and full and on_device(plan, kv) < (1 - HOST_SHARE) * sum(kv.values()):
        because = "the engine did not offload the cache"
        found.append(Misplaced("kv_cache", Degraded("kv_cache", _wanted(plan), _where(kv), because)))
    if compute and on_device(plan, compute) <= 0:
        because = "the engine computes there"
        found.append(Misplaced("kv_cache", Degraded("compute", _wanted(plan), _where(compute), because)))
    return found


def idle_devices(plan: LaunchPlan, sizes: Mapping[str, float]) -> tuple[str, ...]:
    """Return planned devices that hold no weights although others do."""
    if not sizes or plan.settings.n_gpu_layers <= 0 or "CUDA_Split" in sizes:
        return ()
    return tuple(device for device in plan.settings.devices if not sizes.get(device) and on_device(plan, sizes) > 0)


def _wanted(plan: LaunchPlan) -> str:
    return f"on {', '.join(plan.settings.devices) or 'the GPU'}"


def _where(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{mib:.0f} MiB on {name}" for name, mib in sizes.items())
