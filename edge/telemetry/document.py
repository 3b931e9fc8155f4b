"""Build the JSON documents of samples, energy and levels. Pure: `offset_s` is wall clock minus monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import to_builtins

from edge.config.values import ThermalConfig
from edge.telemetry.energy import EnergyMeter
from edge.telemetry.governor import Decision
from edge.telemetry.sample import History, HistoryPoint, Sample

COLUMNS = ("at", "power_w", "temp_c", "gpu_load_ratio", "memory_used_bytes")


def sample_document(sample: Sample | None, now: float) -> dict[str, Any]:
    """Build the document of a sample. Unknown values are null; without a sample `source` is "none"."""
    if sample is None:
        return {"source": "none", "age_s": None}
    plain = to_builtins(sample)
    memory = plain["memory"]
    return {
        "source": sample.source,
        "age_s": round(sample.age_s(now), 2),
        "power": plain["power"],
        "rails": list(plain["rails"]),
        "temperatures": list(plain["zones"]),
        "temp_c": sample.temp_c,
        "gpus": list(plain["gpus"]),
        # By NVML or jtop; empty where neither lists processes, as on an Orin without jtop.
        "gpu_processes": list(plain["gpu_processes"]),
        "memory": memory and {**memory, "gpu_used_bytes": sample.gpu_used_bytes},
        "cpu_load_ratio": sample.cpu_load_ratio,
        "emc": {"load_ratio": sample.emc_load_ratio, "clock_hz": sample.emc_clock_hz},
        "fan": plain["fan"],
        "disk_free_bytes": sample.disk_free_bytes,
        "throttled": list(plain["throttled"]),
        "supply": list(plain["supply"]),
        "overcurrent": plain["overcurrent"],
        "power_mode": plain["power_mode"],
        "jetson_clocks": sample.jetson_clocks,
    }


def governor_document(decision: Decision, config: ThermalConfig) -> dict[str, Any]:
    """Build the document of the thermal governor's last decision."""
    return {
        "level": decision.level.name,
        "because": decision.because,
        "act": config.act,
        "max_watts": config.max_watts,
        "warning": decision.warning,
        "limit": to_builtins(decision.limit),
    }


def energy_document(meter: EnergyMeter) -> dict[str, Any]:
    """Build the document of joules since telemetry started; those of a model are its estimated share.

    Without any measured time they are unknown, not zero.
    """

    def joules(value: float) -> float | None:
        return round(value, 3) if meter.measured_s else None

    return {
        "joules": joules(meter.total_joules),
        "idle_joules": joules(meter.idle_joules),
        "idle_w": meter.idle_w,
        "gap_s": round(meter.gap_s, 1) if meter.measured_s else round(meter.gap_s, 1) or None,
        "models": {
            model: {
                "joules": joules(use.joules),
                "tokens": meter.tokens(model),
                "requests": use.requests,
                "open": meter.open(model),
                "tokens_per_joule": meter.tokens_per_joule(model),
                "tokens_per_joule_error_ratio": meter.error_ratio(model),
                "estimated": True,
            }
            for model, use in meter.by_model.items()
        },
        "hours": [{"start": hour * 3600, "joules": round(used, 1)} for hour, used in sorted(meter.by_hour.items())],
    }


def history_document(history: History, offset_s: float) -> dict[str, Any]:
    """Build rows of COLUMNS: the last ten minutes by second, the last day by minute."""
    return {
        "columns": list(COLUMNS),
        "seconds": _rows(history.seconds, offset_s),
        "minutes": _rows(history.minutes, offset_s),
    }


def _rows(points: Iterable[HistoryPoint], offset_s: float) -> list[list[float | int | None]]:
    return [
        [round(m.at_s + offset_s, 1), *map(_round, (m.power_w, m.temp_c, m.gpu_load_ratio)), m.memory_used_bytes]
        for m in points
    ]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def notes(sample: Sample | None, parts: Mapping[str, Sample], tokens_per_s: float | None) -> list[str]:
    """Return sentences on figures that may mislead."""
    found = []
    jtop = parts.get("jtop")
    others = (part.gpu_load_ratio for name, part in parts.items() if name != "jtop")
    if jtop and jtop.gpu_load_ratio == 0 and tokens_per_s and not any(load is not None for load in others):
        # jtop keeps a source that always reads 0 when it was started before the GPU's node appeared (FC-71).
        found.append("jtop reports GPU load 0 while tokens are generated: restart jtop.service")
    if sample:
        found += [*sample.supply, *sample.notes]
    if sample and sample.power and sample.power.note:
        found.append(f"power: {sample.power.note}")
    return found
