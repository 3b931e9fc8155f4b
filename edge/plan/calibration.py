"""Calibrate the memory estimate by past starts: measured over estimated, per engine and architecture. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from edge.plan.plan import LaunchPlan, Measured
from edge.units import MIB

# The estimate was within these for every generated model (tests/plan/test_plan_real_engine.py): a factor outside them
# is a log that was misread.
_LEAST, _MOST = 0.5, 4.0
_BUFFER = re.compile(r"(?P<where>\S+)\s+(?P<kind>model|KV|RS|compute|output) buffer size =\s+(?P<mib>[\d.]+) MiB")


class Calibration(Struct, frozen=True):
    """A factor on the compute estimate, and the measured bytes of one CUDA context. `last`: the last start."""

    compute: float = 1.0
    context_bytes: int | None = None
    samples: int = 0
    last: Measured | None = None


def measure(what: str, log: Iterable[str], rss_bytes: int | None = None, gpu_bytes: int | None = None) -> Measured:
    """Sum the buffers that an engine's log names. The last load counts: `--fit` logs the same buffers before it."""
    sums = {"model": 0, "KV": 0, "RS": 0, "compute": 0, "output": 0}
    for line in log:
        if "loading model tensors" in line:
            sums = dict.fromkeys(sums, 0)
        for found in _BUFFER.finditer(line):
            sums[found["kind"]] += int(float(found["mib"]) * MIB)
    kv, compute = sums["KV"] + sums["RS"], sums["compute"] + sums["output"]
    return Measured(what, sums["model"], kv, compute, rss_bytes, gpu_bytes)


def calibrate(old: Calibration, plan: LaunchPlan, measured: Measured) -> Calibration:
    """Return the calibration after one more start, whose `plan` was made with `old` applied.

    A larger need counts at once, a smaller one by halves: too little memory kills, too much only costs context.
    """
    estimated = sum(domain.compute_bytes for domain in plan.budget.values()) / old.compute
    compute = old.compute
    if measured.compute_bytes and estimated:
        seen = min(_MOST, max(_LEAST, measured.compute_bytes / estimated))
        compute = seen if seen >= old.compute or not old.samples else (seen + old.compute) / 2
    context = old.context_bytes
    buffers = measured.weights_bytes + measured.kv_bytes + measured.compute_bytes
    if measured.gpu_bytes is not None and plan.settings.n_gpu_layers and buffers:
        beside = max(0, measured.gpu_bytes - buffers) // max(1, len(plan.settings.devices))
        context = beside if context is None or beside > context else (beside + context) // 2
    return replace(old, compute=compute, context_bytes=context, samples=old.samples + 1, last=measured)
