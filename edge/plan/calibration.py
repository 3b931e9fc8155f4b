"""Calibrate the memory estimate by past starts: measured over estimated. Pure.

The error of the compute estimate depends on architecture, batch, context, flash attention and slots, and is kept by
these. The bytes of a CUDA context belong to the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from edge.models.meta import ModelMeta
from edge.plan.plan import LaunchPlan, Measured, Settings
from edge.units import MIB, logged_number

# The estimate was within these for every generated model (python -m tests.bench.memory): a factor outside them is a log
# that was misread.
_LEAST, _MOST = 0.5, 4.0
_LEAST_KV = 0.02  # a window of 1024 tokens in 64k: the cache of a family whose window the planner does not know
_SHAPES = 16  # of models, the latest
# The largest of the last starts counts, so that two models that start by turns agree on one figure; less than the
# estimate only when as many starts as this agree.
_KEPT, _BELIEVED = 4, 3
# With the prefix of the log and the function that prints it: the rest of a line may hold text of a model. Bounded: a
# line may be 4 kB, and `\S+` at any place of it costs the square of that.
_BUFFER = re.compile(
    r"(?:[\d.]{1,20} [DIWEF] )?\w{1,40}:\s{1,40}(?P<where>\w{1,40})\s{1,20}"
    r"(?P<kind>model|KV|RS|compute|output) buffer size =\s{1,20}(?P<mib>[\d.]{1,20}) MiB"
)

_CONTEXT = "constructing llama_context"
_ON_GPU = re.compile(r"CUDA\d+(_Split)?")  # CUDA_Host is memory of the host


class Calibration(Struct, frozen=True):
    """What the last starts with one key took, oldest first. `last`: the last start."""

    compute_factors: tuple[float, ...] = ()
    context_bytes: tuple[int, ...] = ()  # of one CUDA context each
    last: Measured | None = None
    kv_factors: dict[str, tuple[float, ...]] = {}  # by cache_shape: models of one architecture differ in it

    def kv(self, meta: ModelMeta) -> float:
        """Return the factor on the computed cache: other than 1 for a family that the planner does not know well."""
        return min(_MOST, settled(self.kv_factors.get(cache_shape(meta), ()), 1.0))

    @property
    def compute(self) -> float:
        """Return the factor on the compute estimate."""
        return min(_MOST, max(_LEAST, settled(self.compute_factors, 1.0)))


def settled(samples: Iterable[float], estimate: float) -> float:
    """Return the largest of the samples, and not less than `estimate` while they are few.

    A larger need counts at once: too little memory kills, too much only costs context.
    """
    kept = list(samples)
    return max(kept) if len(kept) >= _BELIEVED else max(estimate, *kept, estimate)


def calibration_key(arch: str, settings: Settings) -> str:
    """Return what the compute buffers depend on; contexts count by powers of two."""
    context = 1 << max(0, settings.n_ctx // settings.n_parallel - 1).bit_length()
    flash = settings.flash_attention
    return f"{arch}, batch {settings.n_ubatch}, context {context}, flash {flash}, slots {settings.n_parallel}"


def cache_shape(meta: ModelMeta) -> str:
    """Return what the cache of a model depends on beside settings."""
    heads, window = sum(meta.n_head_kv), meta.sliding_window
    return f"{meta.n_layer} layers, {heads} heads of {meta.key_length}+{meta.value_length}, window {window}"


def last_start(calibrations: Mapping[str, Calibration], arch: str, settings: Settings) -> Measured | None:
    """Return the last start with these settings, else one of the same architecture."""
    same = calibrations.get(calibration_key(arch, settings))
    others = (calibration for key, calibration in calibrations.items() if key.startswith(f"{arch}, "))
    return next((each.last for each in (same, *others) if each is not None and each.last is not None), None)


def measure(
    what: str, log: Iterable[str], rss_bytes: int | None = None, gpu_bytes: int | None = None, *, drafts: bool = False
) -> Measured:
    """Sum the buffers that an engine's log names. The last load counts: `--fit` logs the same buffers before it.

    `drafts`: the context that drafts, and its model, come after the model's; they count only for the GPU.
    """
    sums = {"model": 0, "KV": 0, "RS": 0, "compute": 0, "output": 0, "gpu": 0}
    contexts = 0
    for line in log:
        contexts += _CONTEXT in line
        if "loading model tensors" in line:
            contexts += drafts and contexts > 0
            sums = sums if drafts and contexts else dict.fromkeys(sums, 0)
        if "reserve_compute_meta" in line:  # of a projector
            continue
        if (found := _BUFFER.match(line)) is not None and (mib := logged_number(found["mib"])) is not None:
            size = int(mib * MIB)
            sums[found["kind"]] += 0 if drafts and contexts > 1 else size
            sums["gpu"] += size if _ON_GPU.fullmatch(found["where"]) else 0
    kv, compute = sums["KV"] + sums["RS"], sums["compute"] + sums["output"]
    return Measured(what, sums["model"], kv, compute, rss_bytes, gpu_bytes, sums["gpu"])


def calibrate(old: Calibration, plan: LaunchPlan, measured: Measured, meta: ModelMeta | None = None) -> Calibration:
    """Return the calibration after one more start, whose `plan` was made with `old` applied.

    `meta`: of the model, where context, slots and cache types are as planned. A cache of another size is then the
    plan's error, and is learnt; else the engine's choice.
    """
    later = plan.settings.images.compute_bytes if plan.settings.images else 0  # comes with the first image
    estimated = (sum(domain.compute_bytes for domain in plan.budget.values()) - later) / old.compute
    factors, contexts = list(old.compute_factors), list(old.context_bytes)
    if measured.compute_bytes and estimated:
        factors.append(min(_MOST, max(_LEAST, measured.compute_bytes / estimated)))
    if measured.gpu_bytes is not None and plan.settings.n_gpu_layers and measured.gpu_buffers_bytes:
        beside = max(0, measured.gpu_bytes - measured.gpu_buffers_bytes)
        devices = {*plan.settings.devices, plan.settings.draft_device} - {None, "none"}
        contexts.append(beside // max(1, len(devices)))
    caches = dict(old.kv_factors)
    planned = sum(domain.kv_bytes for domain in plan.budget.values())
    if meta is not None and measured.kv_bytes and planned:
        ratio = measured.kv_bytes * old.kv(meta) / planned
        kept = (*caches.pop(cache_shape(meta), ()), round(min(_MOST, max(_LEAST_KV, ratio)), 4))
        caches[cache_shape(meta)] = kept[-_KEPT:]
    shapes = dict(list(caches.items())[-_SHAPES:])
    return Calibration(tuple(factors[-_KEPT:]), tuple(contexts[-_KEPT:]), measured, shapes)
