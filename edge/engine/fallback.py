"""When a new engine must give way to the former one. Pure: start records in, a decision out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STARTS_BEFORE_ROLLBACK = 3
_OOM_KINDS = frozenset({"out_of_memory", "killed_by_oom", "nvmap_refused", "vram", "oom"})


@dataclass(frozen=True, slots=True)
class Start:
    """One start as the supervisor recorded it. `failed_kind` is the failure's kind when it failed for good."""

    engine: str
    ready: bool
    failed_kind: str | None = None
    oom: bool = False


@dataclass(frozen=True, slots=True)
class Fallback:
    """Use `engine` instead, degraded, and say `because`."""

    engine: str
    instead_of: str
    because: str


def starts_from_records(records: Iterable[Mapping[str, Any]]) -> list[Start]:
    """starts.jsonl → values; records that are not understood are left out.

    `ready_s` says that READY was reached; `outcome` is `ready`, or what stopped it; `failure_kind` names it.
    """
    found = []
    for record in records:
        engine = record.get("engine")
        if not isinstance(engine, str):
            continue
        kind = record.get("failure_kind")
        kind = kind if isinstance(kind, str) else None
        failed = record.get("outcome") == "failed"
        oom = bool(record.get("oom")) or kind in _OOM_KINDS
        ready = record.get("ready_s") is not None
        found.append(Start(engine, ready, (kind or "unknown") if failed else None, oom))
    return found


def fallback(
    current: str, previous: str | None, starts: Iterable[Start], engine_kinds: frozenset[str]
) -> Fallback | None:
    """None unless `current` was never READY, and `previous` was once.

    `engine_kinds`: failures that are the engine's own fault ([rollback] in llama-server.toml). A bad model file fails
    with every engine, and memory running out is answered by a smaller plan: neither is a reason.
    """
    known = list(starts)
    mine = [start for start in known if start.engine == current]
    if previous is None or previous == current or any(start.ready for start in mine):
        return None
    if not any(start.ready for start in known if start.engine == previous):
        return None
    for start in mine:
        if start.failed_kind in engine_kinds and not start.oom:
            return Fallback(previous, current, f"{current} failed for good ({start.failed_kind})")
    # Starts that ended for another known reason say nothing about the engine.
    tried = [start for start in mine if not start.oom and start.failed_kind in (None, "unknown", *engine_kinds)]
    if len(tried) >= STARTS_BEFORE_ROLLBACK:
        return Fallback(previous, current, f"{current} has not become ready in {len(tried)} starts")
    return None
