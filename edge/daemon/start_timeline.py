"""Build the record of one start: spans on the monotonic clock, relative to the start of the process. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, to_builtins

SCHEMA = 1

# The engine's stages between two marks of its log, in order: (span, from mark, to mark).
ENGINE_STAGES = (
    ("backend", "process", "load"),
    ("fit", "fit_begin", "fit_end"),
    ("header", "load", "header"),
    ("vocab", "header", "tensors_begin"),
    ("weights", "tensors_begin", "tensors_end"),
    ("kv_cache", "tensors_end", "kv"),
    ("graph", "kv", "reserve"),
    ("slots", "reserve", "slots"),
    ("listen", "slots", "loaded"),
)


class Span(Struct, frozen=True):
    """One stage of a start, in seconds since the process began. `source`: launcher | log | probe."""

    name: str
    parent: str | None
    start_s: float
    end_s: float
    bytes: int | None = None
    source: str = "launcher"


class Instants(Struct, frozen=True):
    """Monotonic seconds of one start; None where it was not reached."""

    process_s: float  # start of our process; for a restart: the exit of the former engine
    spawned_s: float
    engine_ready_s: float | None = None
    ready_s: float | None = None
    first_token_s: float | None = None


def spans(instants: Instants, launcher: Sequence[Span], marks: Mapping[str, float], weights_bytes: int) -> list[Span]:
    """Return the launcher's spans, the engine as a whole, its stages by its log, and the warm-up."""
    zero = instants.process_s
    result = list(launcher)
    end = instants.engine_ready_s
    if end is not None:
        result.append(Span("engine", None, instants.spawned_s - zero, end - zero, source="probe"))
    for name, begin_mark, end_mark in ENGINE_STAGES:
        begin, finish = marks.get(begin_mark), marks.get(end_mark)
        # Marks come from log lines: a version that lacks one loses its stage, not the record.
        if begin is not None and finish is not None and finish >= begin:
            size = weights_bytes if name == "weights" else None
            result.append(Span(name, "engine", begin - zero, finish - zero, size, "log"))
    if end is not None and instants.ready_s is not None:
        result.append(Span("warm", None, end - zero, instants.ready_s - zero, source="probe"))
    return result


def start_record(
    *,
    start_id: str,
    boot_id: str,
    model: str,
    engine: str,
    rung: int,
    resident_ratio: float | None,
    instants: Instants,
    spans: Sequence[Span],
    weights_bytes: int,
    spawn_cpu_s: float | None,
    outcome: str,
    args: Sequence[str] = (),
    file: str = "",
    board: str = "",
    remembered: bool = False,
    samples: Sequence[Sequence[float | int | None]] = (),
    gates: Mapping[str, float] | None = None,
    since_boot: bool = False,
    load_mode: str | None = None,
) -> dict[str, Any]:
    """Return one record of starts.jsonl. Times are rounded to 0.1 ms, the precision of the log's timestamps.

    `args`: the operator's own options of the engine. `gates`: when each gate opened, monotonic. `since_boot`: this is
    no restart; then `boot` has its begin since the kernel's start. `load_mode`: by the engine's log.
    """
    zero = instants.process_s
    return {
        "schema": SCHEMA,
        "start_id": start_id,
        "boot_id": boot_id,
        "model": model,
        "file": file,
        "engine": engine,
        "board": board,
        "rung": rung,
        "args": list(args),
        "cache_state": {"resident_ratio": resident_ratio, "load_mode": load_mode},
        "clock": "monotonic + boot offset",
        "boot": {"process_s": round(zero, 4) if since_boot else None, "service_s": None},
        "spans": [_rounded(to_builtins(span, enc_hook=str)) for span in spans],
        "spawn_cpu_s": None if spawn_cpu_s is None else round(spawn_cpu_s, 4),
        **_moments(instants),
        "gates": {name: round(at_s - zero, 4) for name, at_s in (gates or {}).items()},
        "limit": {"bytes": weights_bytes, "rate": None, "fixed_s": None, "total_s": None},
        "samples": list(samples),
        "outcome": outcome,
        "remembered": remembered,
    }


def _moments(instants: Instants) -> dict[str, float | None]:
    """Return the instants in seconds since the process began."""
    found = {
        "spawn_s": instants.spawned_s,
        "engine_ready_s": instants.engine_ready_s,
        "ready_s": instants.ready_s,
        "first_token_s": instants.first_token_s,
    }
    zero = instants.process_s
    return {name: None if at_s is None else round(at_s - zero, 4) for name, at_s in found.items()}


def with_limit(
    record: dict[str, Any], *, file: str, bytes_s: int, streams: int, others: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return a record of `file` with its limit, if it lacks one: the bytes at that rate, and the engine's other stages.

    Those stages are the shortest known, of this start or of `others` with this file, engine and rung: after a cold
    start with mmap the engine still reads weights in them, by page faults. `distance` is the engine's time over the
    limit: 1 is as fast as the disk allows, below 1 came from the page cache.
    """
    limit, own_s = record.get("limit", {}), _fixed_s(record)
    if record.get("file") != file or limit.get("rate") is not None or own_s is None:
        return record
    alike = [each for each in others if all(each.get(key) == record.get(key) for key in ("file", "engine", "rung"))]
    fixed_s = min([own_s, *(found for each in alike if (found := _fixed_s(each)) is not None)])
    engine_s = record["engine_ready_s"] - record["spawn_s"]
    total_s = limit["bytes"] / bytes_s + fixed_s
    found_limit = {"rate": bytes_s, "streams": streams, "fixed_s": round(fixed_s, 4), "total_s": round(total_s, 4)}
    return record | {"limit": limit | found_limit | {"distance": round(engine_s / total_s, 3)}}


def _fixed_s(record: Mapping[str, Any]) -> float | None:
    """Return the seconds of an engine's start outside the stage that reads weights; None if it did not get so far.

    They take as long on a faster disk: only the bytes have a limit.
    """
    weights = next((span for span in record.get("spans", ()) if span["name"] == "weights"), None)
    if record.get("engine_ready_s") is None or weights is None:
        return None
    engine_s: float = record["engine_ready_s"] - record["spawn_s"]
    weights_s: float = weights["end_s"] - weights["start_s"]
    return max(0.0, engine_s - weights_s)


def with_service_start(record: dict[str, Any], *, start_id: str, service_s: float) -> dict[str, Any]:
    """Return the record of that start with the moment when systemd began to start its service, since the kernel's."""
    if record.get("start_id") != start_id or not isinstance(record.get("boot"), dict):
        return record
    return record | {"boot": record["boot"] | {"service_s": round(service_s, 4)}}


def _rounded(span: dict[str, Any]) -> dict[str, Any]:
    return {**span, "start_s": round(span["start_s"], 4), "end_s": round(span["end_s"], 4)}
